"""Jobs of the soak test: mostly short, some fail once, some are snoozed."""

from tenacity import wait_fixed

from reliq import Consumer, Job, Queue, Snooze

SOAK = Queue("soak", int, retries=5)

consumer = Consumer()


@consumer.handler(SOAK, lease=10, backoff=wait_fixed(1))
def work(number: int, job: Job[int]) -> None:
    if number % 50 == 0 and job.attempt == 1:
        raise ValueError("fails the first time")
    if number % 97 == 0 and job.due and job.enqueued and job.due - job.enqueued < 0.5:
        raise Snooze(delay=0.5)
