"""What a test has published, in Redis and in an outbox, whose rows move to the test's Redis."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, get_args

from reliq.admin import calls
from reliq.errors import UndecodableError
from reliq.handlers.settlement import undecodable
from reliq.outbox.relay import OutboxMover, Relay
from reliq.outbox.store import Database
from reliq.outbox.tables import check_dialect, percent
from reliq.outbox.transactions import wrong_kind
from reliq.redis import commands
from reliq.redis.commands import Command, read_ids
from reliq.text import chunked
from reliq.wire_format import open_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reliq.keys import Keys
    from reliq.message import Priority
    from reliq.queue import Queue
    from reliq.redis.client import Client


def move(outbox: Any, prefix: str) -> int:
    """Move the rows of an outbox to the test's Redis: of a `Relay`, or those that a transaction sees; return how many."""
    relay = outbox if isinstance(outbox, Relay) else Relay(TransactionDatabase(outbox), prefix=prefix)
    with closing(OutboxMover(relay)) as mover:
        return mover.move_all()


async def amove(outbox: Any, prefix: str) -> int:
    """As `move`; `outbox` may be an AsyncSession or AsyncConnection of SQLAlchemy."""
    if hasattr(outbox, "run_sync"):
        moved: int = await outbox.run_sync(move, prefix)
        return moved
    return move(outbox, prefix)


class TransactionDatabase(Database):
    """
    The database of a relay within a transaction of the test: rows are read and marked in it, and nothing is committed.

    Args:
        tx: what `Queue.publish_in` takes in blocking code.
    """

    def __init__(self, tx: Any) -> None:
        super().__init__()
        self._tx = tx
        self._query, dialect = self._known()
        self.dialect = check_dialect(dialect)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        return [tuple(row) for row in self._query(sql, values or {})]

    def _known(self) -> tuple[Callable[[str, Mapping[str, Any]], Sequence[Any]], str]:
        """Return how the library of the transaction runs a statement, and the dialect of its database."""
        tx = self._tx
        if isinstance(tx, sqlite3.Connection):
            return self._sqlite, "sqlite"
        if hasattr(tx, "in_atomic_block"):
            return self._django, tx.vendor
        if hasattr(tx, "pgconn") and not hasattr(tx, "__aenter__"):
            return self._psycopg, "postgresql"
        if (hasattr(tx, "get_bind") or hasattr(tx, "dialect")) and not hasattr(tx, "run_sync"):
            return self._sqlalchemy, (tx if hasattr(tx, "dialect") else tx.get_bind()).dialect.name
        raise wrong_kind(tx, "a Relay, or what publish_in takes; in async code `await reliq.arelay(session)`")

    def _sqlite(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        cursor = self._tx.cursor()
        cursor.row_factory = None  # the connection's own may make rows that are no tuples
        return cursor.execute(sql, values).fetchall()  # type: ignore[no-any-return]

    def _psycopg(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        psycopg = import_module("psycopg")
        cursor = psycopg.Cursor(self._tx, row_factory=psycopg.rows.tuple_row)
        cursor.execute(percent(sql), values)
        return cursor.fetchall() if cursor.description else ()

    def _django(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        with self._tx.cursor() as cursor:
            cursor.execute(percent(sql), values)
            return cursor.fetchall() if cursor.description else ()

    def _sqlalchemy(self, sql: str, values: Mapping[str, Any]) -> Sequence[Any]:
        result = self._tx.execute(import_module("sqlalchemy").text(sql), values)
        return result.all() if result.returns_rows else ()


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
        state: `ready` to be claimed, also again as `retry`; `waiting` in the key queue of its key or priority; `pending`
            until it is due; `unack`: in flight, or waiting for its backoff.
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
    """The keyword arguments of `Reliq.published` for type checkers, which describes each."""

    state: State | None
    id: str | None
    headers: Mapping[str, str] | None
    due: float | datetime | None
    key: str | None
    priority: Priority | None


def meets(message: Published[Any], body: Any, match: Match) -> bool:
    """Say whether a message has this body and all of `match`; None matches any value."""
    due = match.get("due")
    if isinstance(due, datetime):
        due = due.timestamp()
    return (
        body in (None, message.body)
        and match.get("state") in (None, message.state)
        and match.get("id") in (None, message.id)
        and match.get("key") in (None, message.key)
        and match.get("priority") in (None, message.priority)
        and (match.get("headers") or {}).items() <= message.headers.items()
        and (due is None or (message.due is not None and abs(message.due - due) <= DUE_SECONDS))
    )


def messages(client: Client, queue: Queue[B]) -> Iterator[Published[B]]:
    """Yield the messages of a queue that have not ended, in each shard those first that are delivered first."""
    for keys in queue.shards():
        for state in ALIVE_STATES:
            for ids in _ids(client, keys, state):
                values = client.run(commands.bodies(keys, ids))
                for id, value in zip(ids, values, strict=True):
                    if value is None:  # it has expired
                        continue
                    header, payload = open_envelope(value, bare=keys.bare)
                    due = None if header.due is None else header.due / 1000
                    try:
                        body = queue.codec.decode(payload)
                    except UndecodableError as error:
                        raise undecodable(error, queue.name, id) from None
                    yield Published(id, body, dict(header.headers), due, state, header.key, header.priority)


def line_ids(keys: Keys, line: str) -> Command[list[str]]:
    """Read the ids that wait under a key, the oldest first."""
    return Command(("LRANGE", keys.line(line), 0, -1), lambda reply: read_ids(reply[::-1]))


def _ids(client: Client, keys: Keys, state: State) -> Iterator[list[str]]:
    """Yield the ids of a state in pieces, those of one key queue together."""
    if state == "waiting":
        start = keys.line("")
        for line in sorted(keys_of(client, f"{start}*")):
            ids = client.run(line_ids(keys, line.removeprefix(start)))
            yield from chunked(ids, READ_IDS)
        return
    at = 0
    while ids := client.run(calls.ids_at(keys, state, at, READ_IDS)):
        at += len(ids)
        yield ids


def keys_of(client: Client, pattern: str = "*") -> list[str]:
    """Return every key of the database that matches, each once: a scan may meet one twice."""
    unique: dict[str, None] = {}
    cursor = -1
    while cursor:
        cursor, keys = client.run(calls.keys_scanned(pattern, max(0, cursor), WALKED_KEYS))
        unique |= dict.fromkeys(keys)
    return list(unique)


def format_messages(published: list[Published[Any]]) -> str:
    """Format messages for a failed assertion."""
    if not published:
        return "there is none"
    more = [f"… and {len(published) - SHOWN} more"] if len(published) > SHOWN else []
    return "\n  ".join([f"there are {len(published)}:", *map(str, published[:SHOWN]), *more])
