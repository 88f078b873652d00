"""The messages that wait in a queue, as a test asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, get_args

from reliq import commands
from reliq.admin import queries, server
from reliq.chunks import chunked
from reliq.errors import UndecodableError
from reliq.settings import check_is_one_of
from reliq.settlement import undecodable
from reliq.testing.queries import line_ids
from reliq.wireformat import open_envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.message import Priority
    from reliq.queue import Queue

B = TypeVar("B")

State = Literal["ready", "waiting", "retry", "pending", "unack"]
ALIVE_STATES: tuple[State, ...] = get_args(State)
#: One read has at most this many messages.
READ_IDS = 500
#: One step of a walk over all keys looks at so many.
WALKED_KEYS = 1000
#: A due time that a test expects is met within this many seconds.
DUE_SECONDS = 1.0
#: A failed assertion shows at most this many messages.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Published(Generic[B]):
    """
    A message that has not ended.

    Attributes:
        due: unix seconds, None for a bare body.
        state: `ready` to be claimed, also again as `retry`; `waiting` in the line of its key or priority; `pending`
            until it is due; `unack`: held, or put off after a failure.
        key: of its publish, None without one.
    """

    id: str
    body: B
    headers: Mapping[str, str]
    due: float | None
    state: State
    key: str | None = None
    priority: Priority = "normal"


class Match(TypedDict, total=False):
    """The keyword arguments of `Reliq.published` for type checkers; `Wanted` describes each."""

    state: State | None
    id: str | None
    headers: Mapping[str, str] | None
    due: float | datetime | None
    key: str | None
    priority: Priority | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """
    A message as a test asks for it; None is anything.

    Attributes:
        headers: those that must be there; a message may have more.
        due: unix seconds or an aware datetime, met within a second.
    """

    body: Any = None
    state: State | None = None
    id: str | None = None
    headers: Mapping[str, str] | None = None
    due: float | datetime | None = None
    key: str | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        if self.state is not None:
            check_is_one_of("state", self.state, ALIVE_STATES)

    def __str__(self) -> str:
        asked = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)

    def meets(self, message: Published[Any]) -> bool:
        """Say whether a message is one of those asked for."""
        return (
            self.body in (None, message.body)
            and self.state in (None, message.state)
            and self.id in (None, message.id)
            and self.key in (None, message.key)
            and self.priority in (None, message.priority)
            and (self.headers or {}).items() <= message.headers.items()
            and self._meets_due(message.due)
        )

    def _meets_due(self, due: float | None) -> bool:
        if self.due is None:
            return True
        wanted = self.due.timestamp() if isinstance(self.due, datetime) else self.due
        return due is not None and abs(due - wanted) <= DUE_SECONDS


def messages(client: Client, queue: Queue[B]) -> Iterator[Published[B]]:
    """Yield the messages of a queue that have not ended, in each shard those first that are delivered first."""
    for keys in queue.shards():
        for state in ALIVE_STATES:
            for ids in _ids(client, keys, state):
                yield from _read(client, queue, keys, state, ids)


def _ids(client: Client, keys: Keys, state: State) -> Iterator[list[str]]:
    """Yield the ids of a state in pieces, those of one line together."""
    if state == "waiting":
        start = keys.line("")
        for line in sorted(keys_of(client, f"{start}*")):
            ids = client.run(line_ids(keys, line.removeprefix(start)))
            yield from chunked(ids, READ_IDS)
        return
    at = 0
    while ids := client.run(queries.ids_at(keys, state, at, READ_IDS)):
        at += len(ids)
        yield ids


def keys_of(client: Client, pattern: str = "*") -> list[str]:
    """Return every key of the database that is spelled so, each once: a scan may meet one twice."""
    found: dict[str, None] = {}
    at = -1
    while at:
        at, keys = client.run(server.keys_scanned(pattern, max(0, at), WALKED_KEYS))
        found |= dict.fromkeys(keys)
    return list(found)


def shown(found: list[Published[Any]]) -> str:
    """Return messages as a failed assertion shows them."""
    if not found:
        return "there is none"
    more = [f"… and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n  ".join([f"there are {len(found)}:", *map(str, found[:SHOWN]), *more])


def _read(client: Client, queue: Queue[B], keys: Keys, state: State, ids: list[str]) -> Iterator[Published[B]]:
    values = client.run(commands.bodies(keys, ids))
    for id, value in zip(ids, values, strict=True):
        if value is not None:  # else it has expired
            header, payload = open_envelope(value, bare=keys.bare)
            due = None if header.due is None else header.due / 1000
            try:
                body = queue.codec.decode(payload)
            except UndecodableError as error:
                raise undecodable(error, queue.name, id) from None
            yield Published(id, body, dict(header.headers), due, state, header.key, header.priority)
