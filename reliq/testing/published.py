"""Reads the messages of a test's Redis, and moves the rows of an outbox there."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, get_args

from reliq.admin.filters import EVERYTHING
from reliq.admin.messages import parts_of, walk
from reliq.admin.session import REPLY_SECONDS, QueueSession
from reliq.errors import UndecodableError
from reliq.handlers.settlement import undecodable
from reliq.outbox.relay import OutboxMover, Relay
from reliq.outbox.store import Database
from reliq.outbox.tables import check_dialect, percent
from reliq.outbox.transactions import wrong_kind
from reliq.redis import commands
from reliq.wire_format import open_envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reliq.message import Priority
    from reliq.queue import Queue
    from reliq.redis.server import Connection


def move(outbox: Any, prefix: str) -> int:
    """Move the rows of a `Relay`, or those that a transaction sees, to the test's Redis; return their number."""
    relay = outbox if isinstance(outbox, Relay) else Relay(TransactionDatabase(outbox), prefix=prefix)
    with closing(OutboxMover(relay)) as mover:
        return mover.move_all()


async def amove(outbox: Any, prefix: str) -> int:
    """Move rows in async code; `outbox` may also be an AsyncSession or AsyncConnection of SQLAlchemy."""
    if hasattr(outbox, "run_sync"):
        moved: int = await outbox.run_sync(move, prefix)
        return moved
    return move(outbox, prefix)


class TransactionDatabase(Database):
    """
    The database of a relay inside a transaction of the test, which reads and marks rows and commits nothing.

    Args:
        tx: a transaction as `Queue.publish_in` takes it in blocking code.
    """

    def __init__(self, tx: Any) -> None:
        super().__init__()
        self._tx = tx
        if isinstance(tx, sqlite3.Connection):
            dialect = "sqlite"
        elif hasattr(tx, "in_atomic_block"):
            dialect = tx.vendor
        elif hasattr(tx, "pgconn") and not hasattr(tx, "__aenter__"):
            dialect = "postgresql"
        elif (hasattr(tx, "get_bind") or hasattr(tx, "dialect")) and not hasattr(tx, "run_sync"):
            dialect = (tx if hasattr(tx, "dialect") else tx.get_bind()).dialect.name
        else:
            raise wrong_kind(tx, "a Relay, or what publish_in takes; in async code `await reliq.arelay(session)`")
        self.dialect = check_dialect(dialect)

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        tx = self._tx
        if isinstance(tx, sqlite3.Connection):
            cursor: Any = tx.cursor()
            cursor.row_factory = None  # the connection's own may make rows that are no tuples
            return list(cursor.execute(sql, values or {}))
        if hasattr(tx, "in_atomic_block"):
            cursor = tx.cursor()
        elif hasattr(tx, "pgconn"):
            psycopg = import_module("psycopg")
            cursor = psycopg.Cursor(tx, row_factory=psycopg.rows.tuple_row)
        else:
            result = tx.execute(import_module("sqlalchemy").text(sql), values or {})
            return [tuple(row) for row in result] if result.returns_rows else []
        with cursor:
            cursor.execute(percent(sql), values or {})
            return list(cursor.fetchall()) if cursor.description else []


B = TypeVar("B")

State = Literal["ready", "waiting", "retry", "pending", "unack"]
ALIVE_STATES: tuple[State, ...] = get_args(State)
#: An expected due time may differ from the due time of a message by this many seconds.
DUE_SECONDS = 1.0
#: A failed assertion shows at most this many messages.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Published(Generic[B]):
    """
    A message that has not ended.

    Attributes:
        id: the message id.
        body: the decoded body.
        headers: the headers that the message was published with.
        due: when the message is due, in unix seconds; None for a body that a program in Go published.
        state: `ready` or `retry` (to be claimed), `waiting` (behind messages of its key or priority), `pending` (due later)
            or `unack` (in flight, or waiting for its backoff).
        key: the message key; None without a key.
        priority: `high`, `normal` or `low`.
    """

    id: str
    body: B
    headers: Mapping[str, str]
    due: float | None
    state: State
    key: str | None = None
    priority: Priority = "normal"


class Match(TypedDict, total=False):
    """Keyword arguments of `Reliq.published` for type checkers; `Reliq.published` describes them."""

    state: State | None
    id: str | None
    headers: Mapping[str, str] | None
    due: float | datetime | None
    key: str | None
    priority: Priority | None


def meets(message: Published[Any], body: Any, match: Match) -> bool:
    """Return whether a message has this body and all of `match`; None matches any value."""
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


def messages(connection: Connection, queue: Queue[B]) -> Iterator[Published[B]]:
    """Yield the messages of a queue that have not ended, shard by shard and state by state, the next to come first."""
    for keys in queue.shards():
        shard = QueueSession(connection.wire(REPLY_SECONDS), keys, connection.clock)
        for state in ALIVE_STATES:
            for part in sorted(parts_of(shard, state, EVERYTHING), key=lambda part: str(part.spot)):
                for step in walk(part):
                    ids = [id for _, id in step.rows]
                    values = shard.run(commands.bodies(keys, ids)) if ids else []
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


def format_messages(published: list[Published[Any]]) -> str:
    """Format messages for a failed assertion."""
    if not published:
        return "there is none"
    more = [f"… and {len(published) - SHOWN} more"] if len(published) > SHOWN else []
    return "\n  ".join([f"there are {len(published)}:", *map(str, published[:SHOWN]), *more])
