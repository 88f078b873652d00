"""The queues and their message types: publishers and workers import them, and the import connects to nothing."""

from dataclasses import dataclass

from reliq import Queue


@dataclass(frozen=True)
class Greeting:
    """A greeting to print."""

    name: str


GREETINGS = Queue("greetings", Greeting, retries=5)
