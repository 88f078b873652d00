"""The handlers whose workers are watched."""

from prometheus_client import Counter
from tenacity import wait_fixed

from reliq import Consumer, Job, Queue, Reject

SHOP = Queue("shop", str, retries=3)

#: A metric of the application's own.
BODIES = Counter("shop_bodies", "Bodies that were handled.")

consumer = Consumer()


#: The lease is one that no busy machine outlasts: what is counted has its reasons in what the test does.
@consumer.handler(SHOP, lease=5, backoff=wait_fixed(0.1))
def shop(body: str, job: Job[str]) -> None:
    if body == "poison":
        raise Reject(reason="poison")
    if body == "flaky" and job.attempt == 1:
        raise ValueError("not today")
    BODIES.inc()
