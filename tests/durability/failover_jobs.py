"""The handler of the failover test: it writes the id of each message into a file."""

import os

from reliq import Consumer, Job, Queue

NUMBERS = Queue("numbers", int, ttl=3600)

consumer = Consumer()


@consumer.handler(NUMBERS, lease=5)
def note(number: int, job: Job[int]) -> None:
    """Append the id as a whole line; several processes may write."""
    descriptor = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{job.id}\n".encode())
    os.close(descriptor)
