"""The handlers: `reliq worker` runs them."""

from reliq import Consumer, Reject

from app.queues import GREETINGS, Greeting

consumer = Consumer()


@consumer.handler(GREETINGS, timeout=60)
def greet(greeting: Greeting) -> None:
    """Print a greeting. After a crash it may run twice: a second run must do no harm."""
    if not greeting.name:
        raise Reject("the name is empty")
    print(f"Hello, {greeting.name}!", flush=True)
