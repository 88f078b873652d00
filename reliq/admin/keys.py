"""The message keys of a queue, and its limits and their change while the queue is in use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Unpack

from reliq.admin import calls
from reliq.admin.messages import every_key
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError
from reliq.lua import transitions
from reliq.publish import check_one_shard
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import UNIT_US, WEIGHT_FIELD, Limits, check_int, milliseconds, seconds
from reliq.text import chunked, shell_command
from reliq.wire_format import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.lua.transitions import KeyQueue, KeyQueues
    from reliq.message import Duration
    from reliq.settings import LimitOptions

#: One call reads at most this many keys.
KEYS_LIMIT = 200

#: The limits that may be cleared, each with its fields in the hash `limits`; a burst goes with its rate.
FIELDS = {
    "ordered": ("ordered", "per_key"),
    "per_key": ("per_key",),
    "rate": ("rate_us", "burst"),
    "burst": ("burst",),
    "key_rate": ("key_rate_us", "key_burst"),
    "key_burst": ("key_burst",),
    "concurrency": ("concurrency",),
}
#: All weights are cleared by this name; one is cleared by `weight:KEY`.
WEIGHTS: Final = "key_weights"
#: Fields that scripts write for themselves.
_OWN = frozenset({"on", "declared", "weighted", "walk"})


class KeyReads(AdminBase):
    """The message keys of a queue, and its limits."""

    def keys(self, queue: str, *, limit: int = 20) -> KeyQueues:
        """Return the keys of a queue with most waiting messages, and how many keys and messages are in which state."""
        session = self._redis.queue(queue)
        most = check_int("limit", limit, least=1, most=KEYS_LIMIT)
        counts = session.run(transitions.counts(session.keys))
        queues = session.run(transitions.key_queues(session.keys, most=most))
        return replace(queues, waiting=counts.waiting)

    def key(self, queue: str, key: str) -> KeyQueue:
        """Return how many messages of one key wait and run, and why they wait."""
        session = self._redis.queue(queue)
        return session.run(transitions.key_queues(session.keys, of=[check_key(key)])).largest[0]

    def each_key(self, queue: str) -> Iterator[KeyQueue]:
        """
        Yield the keys that have waiting or running messages, or that sleep, in no order.

        A key that does not change meanwhile is yielded once.
        """
        session = self._redis.queue(queue)
        return (
            key_queue
            for keys in chunked(every_key(session), KEYS_LIMIT)
            for key_queue in session.run(transitions.key_queues(session.keys, of=keys)).largest
            if key_queue.in_flight or key_queue.state != "empty"
        )

    def limits(self, queue: str) -> Limits:
        """Return the limits of a queue as they hold now: those that a worker declared, or that were set since."""
        session = self._redis.queue(queue)
        stored = session.run(calls.limit_fields(session.keys))
        return read_limits(queue, stored)


class KeyActions(AdminBase):
    """Changes of the limits of a queue, and of its message keys."""

    def set_limits(self, queue: str, *, clear: Sequence[str] = (), **changes: Unpack[LimitOptions]) -> Limits:
        """
        Change limits while the queue is in use, within a second, for many keys within seconds; return all that hold then.

        They hold until a worker starts with other limits in its code than the worker before it. A new rate has its
        default burst unless `burst` is given.

        Args:
            clear: names of limits to remove; `weight:KEY` for one weight, `key_weights` for all of them.
            changes: limits as in `Queue`; None leaves a limit as it is. Keys that `key_weights` does not name keep their weights.

        Raises:
            ConfigurationError: a limit is not allowed, or the queue can have none: it has the Go layout or several shards.
        """
        session = self._redis.queue(queue)
        if session.keys.bare:
            raise ConfigurationError(f"queue {queue!r} has the Go layout: programs in Go ignore limits")
        weights = changes.pop(WEIGHTS, {})
        given = {name: value for name, value in changes.items() if value is not None}
        stored = session.run(calls.limit_fields(session.keys))
        replaced = set[str]()
        for name in (*clear, *given, *(WEIGHT_FIELD + key for key in weights)):
            if name in FIELDS:
                replaced |= {*FIELDS[name]}
            elif name == WEIGHTS or name.startswith(WEIGHT_FIELD):
                replaced |= {
                    field for field in stored if field == name or (name == WEIGHTS and field.startswith(WEIGHT_FIELD))
                }
            else:
                raise ConfigurationError(
                    f"clear must be some of {', '.join(FIELDS)}, {WEIGHTS} and weight:KEY, not {name[:80]!r}"
                )
        now = read_limits(queue, {field: value for field, value in stored.items() if field not in replaced})
        kept = {name: getattr(now, name) for name in FIELDS}
        wanted = Limits(**{**kept, **given, WEIGHTS: {**now.key_weights, **weights}}).fields()
        known_shards = self._redis.publisher(queue).known_shards
        run_blocking(known_shards.read(BLOCKING, for_seconds=PUBLISH_SECONDS))
        check_one_shard(known_shards)
        fields = {field: value for field, value in wanted.items() if stored.get(field) != value and field not in _OWN}
        fields |= dict.fromkeys(stored.keys() - wanted.keys() - _OWN, "")  # an empty field is removed
        if fields:
            session.run(transitions.limit(session.keys, fields))
        return limits_of(wanted)

    def pause_key(self, queue: str, key: str, *, for_: Duration | None = None) -> None:
        """Have no message of one key start, for `for_` seconds or until `resume_key`; running messages go on."""
        session = self._redis.queue(queue)
        if session.keys.bare or session.is_sharded:
            why = "has several shards" if session.is_sharded else "has the Go layout"
            raise ConfigurationError(
                f"queue {queue!r} {why}, and so no keys; "
                f"`{shell_command('pause', queue, layout=session.keys.layout)}` pauses all of it"
            )
        for_ms = None if for_ is None else milliseconds(seconds("for_", for_, least=0.001))
        session.run(transitions.sleep(session.keys, check_key(key), for_ms=for_ms))

    def resume_key(self, queue: str, key: str) -> bool:
        """Resume a key that is paused, or that a handler or its rate put to sleep; return whether it was."""
        session = self._redis.queue(queue)
        return session.run(transitions.sleep(session.keys, check_key(key), for_ms=0))


def read_limits(queue: str, stored: Mapping[str, str]) -> Limits:
    """Return the limits of a queue as Redis stores them; raise ConfigurationError for a malformed value."""
    try:
        return limits_of(stored)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}; `{shell_command('limits', queue, options=['--clear', 'NAME'])}` removes it"
        ) from None


def limits_of(stored: Mapping[str, str]) -> Limits:
    """
    Return the limits in the fields of the hash `limits`; unknown fields are ignored.

    Raises:
        ConfigurationError: something else has written a value that is not allowed.
    """
    ordered = stored.get("ordered") == "1"
    weighted = [name for name in stored if name.startswith(WEIGHT_FIELD)]
    return Limits(
        ordered=ordered,
        per_key=None if ordered else _number("per_key", stored),
        rate=_rate("rate_us", stored),
        burst=_number("burst", stored),
        key_rate=_rate("key_rate_us", stored),
        key_burst=_number("key_burst", stored),
        concurrency=_number("concurrency", stored),
        key_weights={name.removeprefix(WEIGHT_FIELD): _number(name, stored) or 0 for name in weighted},
    )


def _rate(name: str, stored: Mapping[str, str]) -> str | None:
    """Return a rate as a person writes it: the fewest messages, in the shortest unit, that come to the same."""
    us = _number(name, stored)
    if not us:
        return None
    for unit, unit_us in UNIT_US.items():
        number = -(-unit_us // us)
        if -(-unit_us // number) == us:
            return f"{number}/{unit}"
    return f"{-(-UNIT_US['h'] // us)}/h"


def _number(name: str, stored: Mapping[str, str]) -> int | None:
    """Return a number of the hash; None without one."""
    text = stored.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < len(str(2**53))):
        raise ConfigurationError(f"the limits in Redis have {text!r:.40} as {name}, which must be a whole number")
    return int(text)
