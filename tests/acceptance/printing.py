"""A consumer whose handlers print, sixteen at once."""

from reliq import Consumer, Queue

PRINTS = Queue("prints", int)

consumer = Consumer()


@consumer.handler(PRINTS)
def say(number: int) -> None:
    print(f"job {number} " + "x" * 60)
