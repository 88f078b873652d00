"""The handlers of the monitored workers."""

from prometheus_client import Counter
from tenacity import wait_fixed

from reliq import Consumer, Job, Queue, Reject

SHOP = Queue("shop", str, retries=3)

#: A metric of the application.
BODIES = Counter("shop_bodies", "Bodies that were handled.")

consumer = Consumer()


#: This lease outlasts delays of a busy machine, so that only the test's actions change the metrics.
@consumer.handler(SHOP, lease=5, backoff=wait_fixed(0.1))
def shop(body: str, job: Job[str]) -> None:
    if body == "poison":
        raise Reject(reason="poison")
    if body == "flaky" and job.attempt == 1:
        raise ValueError("not today")
    BODIES.inc()
