"""The doctor's findings of queues whose messages have keys, or which have limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reliq import commands, transitions
from reliq.admin import queue_queries
from reliq.admin.discover import chosen
from reliq.admin.doctor.facts import Finding
from reliq.admin.parts import ask_each
from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.limits import Limits
from reliq.message import Counts
from reliq.readable import spoken
from reliq.snapshot.shard_maps import ShardMaps
from reliq.text import count_of, typed
from reliq.transitions import KeyLines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.admin.session import Session
    from reliq.call import Call, Command
    from reliq.keys import Keys

#: A key with so many waiting messages, and more than this part of all that wait, takes most of a queue.
MANY_MESSAGES, MOST_OF_ALL = 1000, 0.5
#: Lines that are looked at in each queue.
LINES = 100
#: A queue that sleeps for longer than this many seconds stands.
LONG_SECONDS = 600.0


class Keyed(NamedTuple):
    """
    A queue with keys or limits, as the doctor sees it.

    Attributes:
        shards: how many it has.
        waiting: messages in lines.
        stored: its limits as Redis has them.
        now: unix seconds by Redis' clock.
    """

    keys: Keys
    shards: int
    waiting: int
    lines: KeyLines
    stored: dict[str, str]
    now: float


def key_findings(session: Session) -> list[Finding]:
    """Return what there is to say of queues with keys or limits; nothing where there is none, or this user may not look."""
    try:
        queues = list(_keyed(session))
    except RedisRefusedError:
        return []
    wrong = [finding for one in queues for finding in judged(one)]
    if wrong or not queues:
        return wrong
    return [Finding("keys", "ok", f"queues with keys or limits: {len(queues)}, and nothing holds them up")]


def _keyed(session: Session) -> Iterator[Keyed]:
    known = chosen(session, ()).queues
    maps = ShardMaps()
    answers, _ = ask_each(session, known, transitions.counts, maps)
    found = {
        keys: parts
        for keys, parts in zip(known, answers, strict=True)
        if any(isinstance(part, Counts) and part.keyed for part in parts)
    }
    [now_ms] = session.run_all([commands.server_ms()]) if found else [0]
    for keys, parts in found.items():
        asked: list[Call[Any] | Command[Any]] = [
            transitions.lines(keys, most=LINES),
            queue_queries.limit_fields(keys),
        ]
        lines, stored = session.try_all(asked)
        if isinstance(lines, KeyLines) and isinstance(stored, dict):
            waiting = Counts.sum([part for part in parts if isinstance(part, Counts)]).waiting
            yield Keyed(keys, maps.served(keys), waiting, lines, stored, now_ms / 1000)


def judged(queue: Keyed) -> Iterator[Finding]:
    """Yield what is wrong with a queue."""
    yield from _of_home(queue)
    yield from _of_limits(queue)
    yield from _of_lines(queue)


def _of_home(queue: Keyed) -> Iterator[Finding]:
    name = queue.keys.name
    if queue.keys.bare:
        yield Finding(
            "keys",
            "bad",
            f"{name} has limits in the Go layout",
            "programs in Go know no keys: they take such a message for a broken one",
            f"move its messages to a queue of reliq's own layout, then delete the key {queue.keys.limits}",
        )
    elif queue.shards > 1:
        yield Finding(
            "keys",
            "bad",
            f"{name} has keys or limits, and {queue.shards} shards",
            "limits hold in the first shard alone, and messages of one key may lie in several",
            typed("shards", name, "1"),
        )


def _of_limits(queue: Keyed) -> Iterator[Finding]:
    name = queue.keys.name
    try:
        Limits.read(queue.stored)
    except ConfigurationError as error:
        yield Finding(
            "keys",
            "bad",
            f"the limits of {name} make no sense: {error}",
            "nothing of the queue may start, or more than was meant",
            typed("limits", name, options=["--clear", "NAME"]),
        )
    until = queue.lines.asleep_until
    if until is not None and until - queue.now > LONG_SECONDS:
        yield Finding(
            "keys",
            "warning",
            f"{name} sleeps for {spoken(until - queue.now)} more: a handler has raised RateLimited for a message without key",
            "no message of it starts until then",
            f"{typed('resume', name)}; publish its messages with a key",
        )


def _of_lines(queue: Keyed) -> Iterator[Finding]:
    name, largest = queue.keys.name, queue.lines.largest
    standing = [one for one in largest if one.state == "standing"]
    if standing:
        yield Finding(
            "keys",
            "bad",
            f"{count_of(len(standing), 'line')} of {name} {'stands' if len(standing) == 1 else 'stand'}, as that of key "
            f"{standing[0].key!r} with {count_of(standing[0].waiting, 'message')}",
            "nothing holds them up, and nobody serves them: a write was lost, or something else has changed a key",
            typed("check", name, options=["--repair"]),
        )
    first = next(iter(largest), None)
    if (
        first is not None
        and first.waiting >= MANY_MESSAGES
        and first.waiting > MOST_OF_ALL * queue.waiting
        and len(largest) > 1
    ):
        yield Finding(
            "keys",
            "warning",
            f"key {first.key!r} has {first.waiting:,} of the {queue.waiting:,} messages that wait in {name}",
            "others have their turns beside it; its own messages wait for each other",
            f"{typed('limits', name)} shows what it may; {typed('purge', name, options=['--key', first.key])} deletes what need not run",
        )
