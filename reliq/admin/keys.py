"""Methods that read and change the message keys and the limits of a queue in use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Unpack

from reliq.admin import calls
from reliq.admin.messages import every_key
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError
from reliq.keys import limit_key
from reliq.lua import transitions
from reliq.publish import check_one_shard
from reliq.redis import commands
from reliq.redis.commands import Command
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import BY_COST, UNIT_US, WEIGHT_FIELD, LimitOptions, Limits, check_int, milliseconds, seconds
from reliq.text import chunked, shell_command
from reliq.wire_format import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.lua.transitions import KeyQueue, KeyQueues
    from reliq.message import Duration

#: One script call reads at most this many message keys.
KEYS_LIMIT = 200
#: Number of Redis keys in one step of a SCAN, which blocks Redis for less than a millisecond.
STEP_KEYS = 1000

#: For each limit that `set_limits` can clear, the fields that it then removes from the Redis hash `limits`. Clearing a
#: rate also removes its burst.
FIELDS = {
    "ordered": ("ordered", "per_key"),
    "per_key": ("per_key",),
    "rate": ("rate_us", "burst", "cost_ns", "cost_burst"),
    "burst": ("burst", "cost_burst"),
    "key_rate": ("key_rate_us", "key_burst"),
    "key_burst": ("key_burst",),
    "concurrency": ("concurrency",),
}
#: In `clear`, this name removes the weights of all message keys. The name `weight:KEY` removes the weight of one key.
WEIGHTS: Final = "key_weights"
#: Fields of the Redis hash `limits` that are not limits. Only scripts use these fields.
_OWN = frozenset({"on", "declared", "weighted", "walk"})


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """
    One rate of a limit that several queues share. Redis stores the rate that the last started worker declared.

    Attributes:
        rate: maximum number of messages that start per time unit, such as "500/m"; or their maximum total cost, such as
            "100000/m by cost".
        burst: number of messages, or their total cost, that may start together after a pause.
        free: number of messages, or their total cost, that may start now; 0 if workers have booked later starts.
    """

    name: str
    rate: str
    burst: int
    free: int


class KeyReads(AdminBase):
    """The methods that read the message keys and the limits of a queue."""

    def keys(self, queue: str, *, limit: int = 20) -> KeyQueues:
        """
        Return the message keys with the most waiting messages, and the total numbers of keys and messages.

        Args:
            queue: name of the queue.
            limit: maximum number of message keys.
        """
        session = self._queue(queue)
        most = check_int("limit", limit, least=1, most=KEYS_LIMIT)
        counts = session.run(transitions.counts(session.keys))
        queues = session.run(transitions.key_queues(session.keys, most=most))
        return replace(queues, waiting=counts.waiting)

    def key(self, queue: str, key: str) -> KeyQueue:
        """Return the numbers of waiting and running messages of a message key, and why its messages wait."""
        session = self._queue(queue)
        return session.run(transitions.key_queues(session.keys, of=[check_key(key)])).largest[0]

    def each_key(self, queue: str) -> Iterator[KeyQueue]:
        """
        Yield the message keys that are throttled or have waiting or running messages, in any order.

        A key whose state does not change during the iteration is yielded exactly once.
        """
        session = self._queue(queue)
        return (
            key_queue
            for keys in chunked(every_key(session), KEYS_LIMIT)
            for key_queue in session.run(transitions.key_queues(session.keys, of=keys)).largest
            if key_queue.in_flight or key_queue.state != "empty"
        )

    def limits(self, queue: str) -> Limits:
        """Return the limits that are in effect now: declared by a worker, or changed later by an operator."""
        session = self._queue(queue)
        stored = session.run(calls.limit_fields(session.keys))
        return read_limits(queue, stored)

    def shared_limits(self) -> list[SharedLimit]:
        """Scan all Redis keys for the limits that several queues share; return their rates, sorted by name."""
        session = self._session()
        scan = partial(calls.keys_scanned, limit_key("*"), count=STEP_KEYS)
        keys = sorted({key for server in session.each().values() for some in server.scan(scan) for key in some})
        now_us = session.run(commands.server_ms()) * 1000

        def read(key: str, reply: Sequence[bytes | None]) -> list[SharedLimit]:
            rates, bursts, buckets, full, cost_full = ((text or b"").decode() for text in reply)
            every, _, cost_every, _ = map(int, buckets.split())
            found = []
            for rate, burst in zip(rates.split(", "), map(int, bursts.split(", ")), strict=True):
                unit_ns, full_us = (cost_every, cost_full) if rate.endswith(BY_COST) else (every, full)
                free = math.floor(burst - (int(full_us or now_us) - now_us) * 1000 / unit_ns)
                name = key[len(limit_key("")) - 1 : -1]
                found.append(SharedLimit(name, rate, burst, max(0, min(burst, free))))
            return found

        fields = ("rate", "burst", "buckets", "full", "cost_full")
        return [one for key in keys for one in session.run(Command(("HMGET", key, *fields), partial(read, key)))]


class KeyActions(AdminBase):
    """The methods that change the limits of a queue, and pause and resume its message keys."""

    def set_limits(self, queue: str, *, clear: Sequence[str] = (), **changes: Unpack[LimitOptions]) -> Limits:
        """
        Change the limits of a queue in use; return all limits now in effect.

        The change takes effect within a second, or within some seconds if the queue has many message keys. It stays in
        effect until you change the limits in the workers' code: the first worker with the new code then stores its
        limits. If `rate` is given without `burst`, the burst is the default for this rate.

        Args:
            queue: name of the queue.
            clear: names of limits to remove; `weight:KEY` for one weight, `key_weights` for all weights.
            changes: limits as in `Queue`; None leaves a limit unchanged. Keys that are not in `key_weights` keep their
                weights.

        Raises:
            ConfigurationError: a limit is not allowed, or the queue cannot have limits, because it has the Go layout
                or several shards.
        """
        session = self._queue(queue)
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
        known_shards = self._publisher(queue).known_shards
        run_blocking(known_shards.read(BLOCKING, for_seconds=PUBLISH_SECONDS))
        check_one_shard(known_shards)
        fields = {field: value for field, value in wanted.items() if stored.get(field) != value and field not in _OWN}
        # If the new value of a field is empty, the script `limit` removes the field.
        fields |= dict.fromkeys(stored.keys() - wanted.keys() - _OWN, "")
        if fields:
            session.run(transitions.limit(session.keys, fields))
        return limits_of(wanted)

    def pause_key(self, queue: str, key: str, *, for_: Duration | None = None) -> None:
        """
        Pause a message key: workers start no further messages of the key; running messages continue.

        Args:
            queue: name of the queue.
            key: the message key.
            for_: seconds until the key resumes; None for no end before `resume_key`.
        """
        session = self._queue(queue)
        if session.keys.bare or session.is_sharded:
            why = "has several shards" if session.is_sharded else "has the Go layout"
            pause = shell_command("pause", queue, layout=session.keys.layout)
            raise ConfigurationError(f"queue {queue!r} {why}, and so no message keys; `{pause}` pauses the whole queue")
        for_ms = None if for_ is None else milliseconds(seconds("for_", for_, least=0.001))
        session.run(transitions.sleep(session.keys, check_key(key), for_ms=for_ms))

    def resume_key(self, queue: str, key: str) -> bool:
        """Resume a paused or throttled key; return whether it was paused or throttled."""
        session = self._queue(queue)
        return session.run(transitions.sleep(session.keys, check_key(key), for_ms=0))


def read_limits(queue: str, stored: Mapping[str, str]) -> Limits:
    """
    Return the limits of a queue from the fields of its Redis hash `limits`.

    Raises:
        ConfigurationError: a value in the hash is invalid. The error names the command that removes the value.
    """
    try:
        return limits_of(stored)
    except ConfigurationError as error:
        clear = shell_command("limits", queue, options=["--clear", "NAME"])
        raise ConfigurationError(f"{error}; `{clear}` removes it") from None


def limits_of(stored: Mapping[str, str]) -> Limits:
    """
    Return the limits from the fields of the Redis hash `limits`; ignore unknown fields.

    Raises:
        ConfigurationError: a value is invalid, because another program wrote it.
    """
    ordered = stored.get("ordered") == "1"
    read = [
        (_rate(name, stored), _number(burst, stored))
        for name, burst in (("rate_us", "burst"), ("cost_ns", "cost_burst"))
    ]
    rates = [(rate, burst) for rate, burst in read if rate]
    weighted = [name for name in stored if name.startswith(WEIGHT_FIELD)]
    return Limits(
        ordered=ordered,
        per_key=None if ordered else _number("per_key", stored),
        rate=[rate for rate, _ in rates],
        burst=[burst for _, burst in rates],
        key_rate=_rate("key_rate_us", stored),
        key_burst=_number("key_burst", stored),
        concurrency=_number("concurrency", stored),
        key_weights={name.removeprefix(WEIGHT_FIELD): _number(name, stored) or 0 for name in weighted},
    )


def _rate(name: str, stored: Mapping[str, str]) -> str | None:
    """Return the rate in a field of the hash `limits` as text, such as "500/m"; None if the field is missing."""
    us = _number(name, stored)
    if not us:
        return None
    scale, end = (1000, BY_COST) if name == "cost_ns" else (1, "")
    for unit, unit_us in UNIT_US.items():
        number = -(-unit_us * scale // us)
        if -(-unit_us * scale // number) == us:
            return f"{number}/{unit}{end}"
    return f"{number}/h{end}"


def _number(name: str, stored: Mapping[str, str]) -> int | None:
    """Return the number in a field of the hash `limits`; None if the field is missing."""
    text = stored.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < len(str(2**53))):
        raise ConfigurationError(f"the limits in Redis have {text!r:.40} as {name}, which must be a whole number")
    return int(text)
