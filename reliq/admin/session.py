"""Sessions of an operator with one Redis and one queue: every request is tried for the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.admin import queue_queries
from reliq.client.client import Client
from reliq.errors import ConfigurationError, LoginError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import Keys, Layout, check_layout, is_name
from reliq.queue import Queue
from reliq.settings import MIB
from reliq.transport.connection import Connection, check_slots
from reliq.wireformat import ServerVersion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Clock, Request, T
    from reliq.transport.many import Wire
    from reliq.transport.target import Target

#: A request of an operator is tried again for this many seconds before Redis counts as away.
PATIENCE_SECONDS = 2.0
#: One reply is awaited for this many seconds: some replies are large.
REPLY_SECONDS = 5.0
#: An operator publishes no larger body, in bytes.
LARGEST_BODY = 16 * MIB
#: The layouts in which a queue is looked for that is unknown in its own.
LAYOUTS = (Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True))


class UnknownQueueError(ConfigurationError):
    """Nothing in Redis says that there is a queue of that name."""


class Session:
    """
    One Redis, as an operator asks it.

    Attributes:
        client: makes the requests.
    """

    def __init__(self, wire: Wire, clock: Clock | None = None) -> None:
        self.client = Client(wire, clock=clock)
        self._wire, self._clock = wire, clock

    def each(self, *, replicas: bool = False) -> dict[str, Session]:
        """Return a session with each server, by its name, and with `replicas` with those too: none speaks for all."""
        [answer] = self.try_all([commands.server_ms()])  # the servers are known then
        if isinstance(answer, RedisUnavailableError | LoginError):
            raise answer
        return {name: Session(wire, self._clock) for name, wire in self._wire.each(replicas=replicas).items()}

    def run(self, request: Request[T]) -> T:
        """Make a request; raise what Redis refused, or that it is away."""
        return self.client.run(request, for_seconds=PATIENCE_SECONDS)

    def run_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; raise the first refusal."""
        answers = self.try_all(requests)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def try_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; a refused one has its exception as answer."""
        return self.client.run_all(requests, for_seconds=PATIENCE_SECONDS)

    def read_each(self, requests: Sequence[Request[T]], instead: T) -> list[T]:
        """Make requests in one round trip; a key of another type, which a foreign program wrote, gives `instead`."""
        answers = self.try_all(requests)
        for at, answer in enumerate(answers):
            if isinstance(answer, WrongKeyTypeError):
                answers[at] = instead
            elif isinstance(answer, Exception):
                raise answer
        return answers

    def version(self) -> ServerVersion:
        """Return the version of the server; one that hides it counts as new."""
        try:
            facts = self.run(commands.server_facts("server"))
        except RedisRefusedError:
            facts = {}
        return ServerVersion.read(facts)


class QueueSession(Session):
    """One queue, as an operator asks it."""

    def __init__(self, wire: Wire, keys: Keys, clock: Clock | None = None) -> None:
        super().__init__(wire, clock)
        self.keys = keys

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    def check_known(self) -> None:
        """
        Raise UnknownQueueError when nothing in Redis says that the queue exists: a name mistyped is no empty queue.

        The registry says so, or a structure, a total, a dead letter or an end. The error names the layout that has it.
        """
        keys = self.keys
        if self.run(queue_queries.key_count(keys)) or self.run(queue_queries.is_registered(keys)):
            return
        elsewhere = " and ".join(f"--layout {layout}" for layout in self._other_layouts())
        raise UnknownQueueError(
            f"there is no queue {keys.name!r} here{f' in the layout {keys.layout}' if keys.bare else ''}; "
            + (f"there is one with {elsewhere}" if elsewhere else "`reliq queues --scan` lists what there is")
        )

    def _other_layouts(self) -> list[Layout]:
        """Return the other layouts in which a queue of this name has messages or totals; a refusal counts as none."""
        others = [layout for layout in LAYOUTS if layout != self.keys.layout and is_name(self.name, layout)]
        answers = self.try_all([queue_queries.is_used(Keys(self.name, layout)) for layout in others])
        return [layout for layout, answer in zip(others, answers, strict=True) if answer is True]


class Sessions:
    """
    The way to one Redis and to its queues.

    Attributes:
        target: what was given.
        connection: to that Redis.

    Raises:
        ConfigurationError: no Redis is named, or reliq cannot use it.
    """

    def __init__(self, url: Target | None, layout: Layout) -> None:
        self.target, self._layout = url, layout
        self.connection = Connection.to(url)
        check_layout(layout)
        check_slots(url, layout)

    def keys(self, queue: str) -> Keys:
        """Return the keys of a queue; raise ConfigurationError for a name that is not allowed."""
        return Keys(queue, self._layout)

    def session(self) -> Session:
        """Return the session of the whole Redis."""
        return Session(self.connection.wire(REPLY_SECONDS), self.connection.clock)

    def queue(self, name: str) -> QueueSession:
        """Return the session of a queue; raise ConfigurationError for an unknown one."""
        session = QueueSession(self.connection.wire(REPLY_SECONDS), self.keys(name), self.connection.clock)
        session.check_known()
        return session

    def publisher(self, name: str) -> Queue[bytes]:
        """Return a queue whose bodies are bytes."""
        return Queue(name, bytes, url=self.target, layout=self._layout, max_body=LARGEST_BODY)

    def other(self, queue: str, to: str) -> Queue[bytes]:
        """Return the queue that messages of `queue` go to; raise ConfigurationError for the same, or an unknown one."""
        if to == queue:
            raise ConfigurationError(f"messages of {queue!r} cannot go to {queue!r} itself; name another queue")
        try:
            self.queue(to)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; messages go only to a queue that was used before") from None
        return self.publisher(to)
