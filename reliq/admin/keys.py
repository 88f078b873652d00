"""The limits of a queue as they are now, and their change while it is in use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from reliq.admin import calls
from reliq.admin.messages import NO_KEYS, opaque, read_opaque
from reliq.errors import ConfigurationError
from reliq.lua import transitions
from reliq.publish.publisher import check_one_shard
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import Limits, check_int, milliseconds, seconds
from reliq.text import shell_command
from reliq.wire_format import check_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reliq.admin.calls import KeySet
    from reliq.admin.session import QueueSession
    from reliq.lua.transitions import KeyQueue
    from reliq.message import Duration
    from reliq.queue import Queue
    from reliq.redis.commands import Call


#: The limits that may be cleared, each with the fields of the hash `limits` that say it; a burst goes with its rate.
FIELDS = {
    "ordered": ("ordered", "per_key"),
    "per_key": ("per_key",),
    "rate": ("rate_us", "burst"),
    "burst": ("burst",),
    "key_rate": ("key_rate_us", "key_burst"),
    "key_burst": ("key_burst",),
    "concurrency": ("concurrency",),
}
#: A weight is cleared by `weight:KEY`, all of them by `key_weights`.
WEIGHT, WEIGHTS = "weight:", "key_weights"
#: Fields that scripts write for themselves.
_OWN = frozenset({"on", "declared", "weighted", "walk"})


def limits_of(queue: QueueSession) -> Limits:
    """Return the limits of a queue; raise ConfigurationError for a value there that is none."""
    stored = queue.run(calls.limit_fields(queue.keys))
    return _read(queue, stored)


def set_limits(
    queue: QueueSession, publisher: Queue[bytes], changes: Mapping[str, Any], clear: Sequence[str]
) -> Limits:
    """
    Clear limits, change others, and return what holds then.

    Raises:
        ConfigurationError: a limit is not allowed, or the queue cannot have any: it has the Go layout or several shards.
    """
    if queue.keys.bare:
        raise ConfigurationError(f"queue {queue.name!r} has the Go layout: its programs know no limits")
    given = {name: value for name, value in changes.items() if value is not None}
    weights = given.pop(WEIGHTS, {})
    stored = queue.run(calls.limit_fields(queue.keys))
    now = _read(queue, _without(stored, [*clear, *given, *(WEIGHT + key for key in weights)]))
    kept = {name: getattr(now, name) for name in (*FIELDS, WEIGHTS)}
    after = Limits(**{**kept, **given, WEIGHTS: {**now.key_weights, **weights}})
    publisher.known_shards.read(for_seconds=PUBLISH_SECONDS)
    check_one_shard(publisher.known_shards)
    wanted = after.fields()
    if fields := _changed(stored, wanted):
        queue.run(transitions.limit(queue.keys, fields))
    return Limits.read(wanted)


def _read(queue: QueueSession, stored: Mapping[str, str]) -> Limits:
    try:
        return Limits.read(stored)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}; `{shell_command('limits', queue.name, options=['--clear', 'NAME'])}` removes it"
        ) from None


def _without(stored: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the stored fields without those of the limits named; raise ConfigurationError for one that is none."""
    gone = set[str]()
    for name in names:
        if name in FIELDS:
            gone |= {*FIELDS[name]}
        elif name == WEIGHTS or name.startswith(WEIGHT):
            gone |= {field for field in stored if field == name or (name == WEIGHTS and field.startswith(WEIGHT))}
        else:
            raise ConfigurationError(
                f"what is cleared must be one of {', '.join(FIELDS)}, {WEIGHTS} or weight:KEY, not {name[:80]!r}"
            )
    return {field: value for field, value in stored.items() if field not in gone}


def _changed(stored: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the fields to write; an empty one goes."""
    new = {field: value for field, value in wanted.items() if stored.get(field) != value and field not in _OWN}
    return new | dict.fromkeys(stored.keys() - wanted.keys() - _OWN, "")


#: One look tells at most so many keys.
PAGE_KEYS = 200
_PLACE = re.compile(r"(ring|asleep) ([0-9]{1,20})|held (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class KeysView:
    """
    The keys of a queue at one moment.

    Attributes:
        largest: those with most waiting messages first: all keys of a queue that has up to a hundred, and of one that has
            more those with a share of what waits.
        waiting: how many messages wait in all lines.
        in_turn: how many keys wait for a worker.
        asleep: how many keys sleep, or are paused.
        running: how many messages run, over all processes.
        is_full: whether none may start now: the queue's rate or concurrency is used up, or the whole queue sleeps.
        asleep_until: until when the whole queue sleeps, in unix seconds by Redis' clock; None when it does not.
    """

    largest: Sequence[KeyQueue]
    waiting: int
    in_turn: int
    asleep: int
    running: int
    is_full: bool
    asleep_until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyPage:
    """
    A page of keys.

    Attributes:
        items: in no order; a page in the middle may have none.
        after: what the next page is asked for with; None after the last.
    """

    items: Sequence[KeyQueue]
    after: str | None


def keys_of(queue: QueueSession, limit: int) -> KeysView:
    """Return the keys of a queue with most waiting messages; raise ConfigurationError for a limit that is not allowed."""
    most = check_int("limit", limit, least=1, most=PAGE_KEYS)
    asked: list[Call[Any]] = [transitions.counts(queue.keys), transitions.lines(queue.keys, most=most)]
    counts, seen = queue.run_all(asked)
    return KeysView(
        seen.largest,
        counts.waiting,
        seen.in_turn,
        seen.asleep,
        seen.running,
        seen.is_full,
        asleep_until=seen.asleep_until,
    )


def key_of(queue: QueueSession, key: str) -> KeyQueue:
    """Return what one key does; raise ConfigurationError for one that no message can have."""
    return queue.run(transitions.lines(queue.keys, of=[check_key(key)])).largest[0]


def key_page_of(queue: QueueSession, after: str | None, limit: int) -> KeyPage:
    """Return the next keys; raise ConfigurationError for a place or limit that is not allowed."""
    count = check_int("limit", limit, least=1, most=PAGE_KEYS)
    among, at = _parsed(after)
    if among == "held":
        names = queue.run(calls.keys_holding(queue.keys, at, count))
        following = f"held {names[-1]}" if names else None
    else:
        cursor, names = queue.run(calls.keys_among(queue.keys, cast("KeySet", among), int(at or 0), count))
        following = f"{among} {cursor}" if cursor else "asleep 0" if among == "ring" else "held"
    return KeyPage(_known(queue, names, among), None if following is None else opaque(following))


def _known(queue: QueueSession, names: Sequence[str], among: str) -> list[KeyQueue]:
    """Return what keys do; those that hold a place and are in turn or asleep besides were met there."""
    meant = [name for name in names if name not in NO_KEYS]
    found = [
        line
        for at in range(0, len(meant), PAGE_KEYS)
        for line in queue.run(transitions.lines(queue.keys, of=meant[at : at + PAGE_KEYS])).largest
    ]
    return found if among != "held" else [one for one in found if one.state not in ("in turn", "asleep", "paused")]


def _parsed(after: str | None) -> tuple[str, str | None]:
    """Return among which keys a page goes on, and where; raise ConfigurationError for what is no place of a page."""
    try:
        text = "ring 0" if after is None else read_opaque(after)
    except (ValueError, AttributeError):
        text = ""
    if text == "held":
        return "held", None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"after must be the `after` of an earlier page of keys, not {str(after)[:40]!r}")
    return (found[1], found[2]) if found[1] else ("held", found[3])


def pause_key(queue: QueueSession, key: str, for_: Duration | None) -> None:
    """Have no message of a key start, for a time or until it is resumed; what runs goes on."""
    if queue.keys.bare or queue.is_sharded:
        why = "has several shards" if queue.is_sharded else "has the Go layout"
        raise ConfigurationError(
            f"queue {queue.name!r} {why}, and so no keys; "
            f"`{shell_command('pause', queue.name, layout=queue.keys.layout)}` pauses all of it"
        )
    for_ms = None if for_ is None else milliseconds(seconds("for_", for_, least=0.001))
    queue.run(transitions.sleep(queue.keys, check_key(key), for_ms=for_ms))


def resume_key(queue: QueueSession, key: str) -> bool:
    """Have a key served again; return whether it slept, or was paused."""
    return queue.run(transitions.sleep(queue.keys, check_key(key), for_ms=0))
