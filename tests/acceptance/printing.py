"""A consumer with sixteen concurrent handlers that print."""

from reliq import Consumer, Queue

PRINTS = Queue("prints", int)

consumer = Consumer()


@consumer.handler(PRINTS)
def say(number: int) -> None:
    print(f"job {number} " + "x" * 60)
