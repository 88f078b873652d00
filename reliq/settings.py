"""
The settings of queues, handlers, workers and limits, checked when they are made; and how long reliq waits and retries.

Durations are seconds or timedelta for people, and become float seconds here; Redis gets whole milliseconds. Backoffs are
tenacity's wait strategies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict

import msgspec
from tenacity import RetryCallState, Retrying, wait_exponential, wait_random, wait_random_exponential

from reliq.errors import ConfigurationError
from reliq.message import RETRIES_LIMIT, Duration
from reliq.text import checking_keywords
from reliq.wire_format import check_key

if TYPE_CHECKING:
    from tenacity.wait import wait_base

    from reliq.keys import Keys


#: 1 to 3 s, 2 to 6, 4 to 12 …, at most an hour; about two hours over twelve retries. Two thirds of the longest wait are
#: jitter: what failed together, when a dependency went down, does not come back together.
DEFAULT_BACKOFF = wait_exponential(max=1800) + wait_random_exponential(multiplier=2, max=1800)

#: The wait between two tries at Redis, in seconds.
RECONNECT = wait_exponential(multiplier=0.05, max=2) + wait_random(0, 0.1)

#: What the names of the outbox's tables begin with.
OUTBOX_PREFIX = "reliq_"
DAY_SECONDS = 86_400.0
#: The longest duration, ten years.
LONGEST_SECONDS = 3650 * DAY_SECONDS
MIB = 1_048_576
#: No queue allows larger bodies, in bytes.
LARGEST_BODY = 16 * MIB
BATCH_LIMIT = 500
#: One round trip brings no more bytes of bodies than about this: neither Redis nor the process is held up for long.
READ_BYTES = 8 * MIB
#: Bodies that have no more bytes together come in the first round trip; of larger ones it brings the sizes.
INLINE_BYTES = 131_072
#: The shortest and the longest lease.
LEASE_SECONDS = (0.05, DAY_SECONDS)
#: How long a batch waits to be full unless its handler says otherwise.
LINGER_SECONDS = 0.05
LONGEST_LINGER_SECONDS = 60.0
#: A rate permits at most this many starts in a second.
STARTS_LIMIT = 10_000
#: The most messages of a key or a queue at once.
HELD_LIMIT = 1_000_000
WEIGHT_LIMIT = 1000
WEIGHTS_LIMIT = 1000
#: Without a burst of its own a rate permits at once what it permits in this part of a second, and one at least.
BURST_PART = 10

#: Microseconds in the units of a rate.
UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_RATE = re.compile(r"([1-9][0-9]{0,7})/([smh])")
#: What the field of a key's weight begins with.
WEIGHT_FIELD = "weight:"


def seconds_after(backoff: wait_base, attempt: int) -> float:
    """
    Return how long `backoff` waits after delivery number `attempt` (1 for the first), in seconds.

    No attempt is beyond the number that retries allow: a strategy may compute 2**attempt.
    """
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = min(attempt, RETRIES_LIMIT + 1)
    return max(0.0, min(LONGEST_SECONDS, float(backoff(state))))


def seconds(name: str, value: Duration, *, least: float = 0.0, most: float = LONGEST_SECONDS) -> float:
    """Return a duration in seconds; raise ConfigurationError naming `name` when it is outside `least`..`most`."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number:  # noqa: PLR0124  NaN
        raise ConfigurationError(f"{name} must be seconds or a timedelta, not {_format_value(value)}")
    if not least <= number <= most:
        raise ConfigurationError(f"{name} must be {least:.10g} to {most:.10g} seconds, not {_format_value(number)}")
    return float(number)


def check_int(name: str, value: int, *, least: int = 0, most: int) -> int:
    """Return a whole number; raise ConfigurationError naming `name` when it is outside `least`..`most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{name} must be a whole number, not {_format_value(value)}")
    if not least <= value <= most:
        raise ConfigurationError(f"{name} must be {least} to {most}, not {_format_value(value)}")
    return value


def check_is_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigurationError naming `name` when a value is not among those allowed."""
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {str(value)[:40]!r}")


def _format_value(value: object) -> str:
    """Return a number as text, unless it is too long to be read; for anything else its type."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def milliseconds(duration: Duration) -> int:
    """Return seconds as whole milliseconds, rounded up: a wait is never cut short."""
    number = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return math.ceil(number * 1000 - 1e-6)


def _check_ints(settings: Any, **bounds: tuple[int, int]) -> None:
    """Check the named numbers of a settings object; None passes where it is the default."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if value is not None or settings.__dataclass_fields__[name].default is not None:
            check_int(name, value, least=least, most=most)


def _set_seconds(settings: Any, **bounds: tuple[float, float]) -> None:
    """Turn the named durations of a frozen settings object into float seconds, checked; None stays if it is the default."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if value is not None or settings.__dataclass_fields__[name].default is not None:
            object.__setattr__(settings, name, seconds(name, value, least=least, most=most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """
    Who must have a message before its publish returns: replicas, or files on disk. `replicas` and `aof` make one.

    The receipt says what was not confirmed in time; the message is published all the same.

    Example: `Queue("orders", durability=Durability.replicas(1))`

    Attributes:
        kind: `none`, `replicas` (Redis' WAIT) or `aof` (WAITAOF).
        count: how many replicas must confirm.
        local: whether the server's own append-only file must be on disk.
        timeout: seconds or timedelta that the publish waits for confirmations (0.001..60).
    """

    kind: Literal["none", "replicas", "aof"] = "none"
    count: int = 0
    local: bool = False
    timeout: Duration = 0.5

    NONE: ClassVar[Durability]

    @classmethod
    def replicas(cls, count: int, timeout: Duration = 0.5) -> Self:
        """
        Wait until `count` replicas have the message in memory, at most `timeout` (seconds or timedelta).

        Raises:
            ConfigurationError: `count` is not 1 to 100, or `timeout` not 0.001 to 60 seconds.
        """
        return cls(kind="replicas", count=check_int("replicas", count, least=1, most=100), timeout=timeout)

    @classmethod
    def aof(cls, *, local: bool = True, replicas: int = 0, timeout: Duration = 2.0) -> Self:
        """
        Wait until the message is on disk (fsync): in the append-only file of the server, of `replicas`, or both.

        It needs Redis 7.2. With `appendfsync everysec` a confirmation takes up to a second and more.

        Raises:
            ConfigurationError: no server is to confirm, `replicas` is not 0 to 100, or `timeout` not 0.001 to 60 seconds.
        """
        if not isinstance(local, bool):
            raise ConfigurationError(f"local must be True or False, not {_format_value(local)}")
        if not local and not check_int("replicas", replicas, most=100):
            raise ConfigurationError("durability by aof needs local=True, or replicas=1 or more")
        return cls(kind="aof", count=check_int("replicas", replicas, most=100), local=local, timeout=timeout)

    def __post_init__(self) -> None:
        _set_seconds(self, timeout=(0.001, 60.0))

    @classmethod
    def checked(cls, given: Any) -> Durability:
        """Return `given` when it is a Durability; raise ConfigurationError for anything else."""
        if not isinstance(given, Durability):
            raise ConfigurationError(
                f"durability must be Durability.replicas(1), Durability.aof() or Durability.NONE, not {_format_value(given)}"
            )
        return given


Durability.NONE = Durability()


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """
    The settings of a queue, keyword arguments of `Queue`; durations are seconds or timedelta.

    Attributes:
        retries: deliveries after the first (0..1000).
        ttl: for how long after the due time a delivery may start.
        max_body: the most bytes of an encoded body (1..16 MiB); a publish refuses a larger one, a worker does not read it.
        dedup: for how long a chosen id stays taken after its end.
        letters_max: how many dead letters are kept; 0 deletes a message at its end, as the Go original does.
        letters_ttl: for how long a dead letter is kept.
        history: how many of the last acked messages are remembered; of other ends, the last 1,000 always are.
        durability: who must have a message before its publish returns.
    """

    retries: int = 12
    ttl: Duration = 7 * DAY_SECONDS
    max_body: int = MIB
    dedup: Duration = 600.0
    letters_max: int = 100_000
    letters_ttl: Duration = 7 * DAY_SECONDS
    history: int = 0
    durability: Durability = Durability.NONE

    def __post_init__(self) -> None:
        _check_ints(self, retries=(0, RETRIES_LIMIT), max_body=(1, LARGEST_BODY))
        _check_ints(self, letters_max=(0, 10_000_000), history=(0, 100_000))
        _set_seconds(
            self, ttl=(0.001, LONGEST_SECONDS), dedup=(0.0, LONGEST_SECONDS), letters_ttl=(1.0, LONGEST_SECONDS)
        )
        Durability.checked(self.durability)


class SettingsOptions(TypedDict, total=False):
    """The fields of `QueueSettings` as keyword arguments, for type checkers."""

    retries: int
    ttl: Duration
    max_body: int
    dedup: Duration
    letters_max: int
    letters_ttl: Duration
    history: int
    durability: Durability


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """
    The settings of a handler, keyword arguments of `Consumer.handler`; durations are seconds or timedelta.

    Attributes:
        lease: after this time a silent worker's message goes to another (0.05 s to a day); renewed while it runs.
        timeout: how long a handler may take; None for no limit.
        concurrency: at most this many calls run at once in a process; None for no limit but the worker's.
        weight: this queue's share of free slots, relative to the others'.
        backoff: tenacity's wait strategy between a failure and the next delivery.
        retry_on: exceptions after which the message is delivered again; after others it is rejected.
        reject_on: exceptions after which the message is rejected, even if they are in `retry_on`.
        undecodable: `retry` a body that does not decode or is too large, with backoff, or `reject` it at once.
        batch: the most messages in one call of a handler that takes a list (1..500); None for one that takes a body.
        linger: how long a batch waits at most to be full (0..60 s); None for 0.05; only with `batch`.
        batch_by_key: whether all messages of a batch have the same key, or none; only with `batch`.

    Example: `@consumer.handler(orders, lease=60, timeout=timedelta(minutes=5), concurrency=4)`
    """

    lease: Duration = 30.0
    timeout: Duration | None = 600.0
    concurrency: int | None = None
    weight: int = 1
    backoff: wait_base = field(default=DEFAULT_BACKOFF)
    retry_on: tuple[type[Exception], ...] = (Exception,)
    reject_on: tuple[type[Exception], ...] = ()
    undecodable: Literal["retry", "reject"] = "retry"
    batch: int | None = None
    linger: Duration | None = None
    batch_by_key: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.batch_by_key, bool):
            raise ConfigurationError(f"batch_by_key must be True or False, not {_format_value(self.batch_by_key)}")
        if self.batch is None and self.batch_by_key:
            raise ConfigurationError("batch_by_key is for batches: give batch too, such as batch=100, or leave it out")
        if self.batch is None and self.linger is not None:
            raise ConfigurationError("linger is for batches: give batch too, such as batch=100, or leave it out")
        _check_ints(self, batch=(1, BATCH_LIMIT), concurrency=(1, 10_000), weight=(1, WEIGHT_LIMIT))
        _set_seconds(self, lease=LEASE_SECONDS, linger=(0.0, LONGEST_LINGER_SECONDS))
        if self.timeout is not None:
            _set_seconds(self, timeout=(0.001, LONGEST_SECONDS))
        for name in ("retry_on", "reject_on"):
            given = getattr(self, name)
            kinds = given if isinstance(given, tuple) else (given,)
            if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
                raise ConfigurationError(f"{name} must be exception classes")
            object.__setattr__(self, name, kinds)
        if not callable(self.backoff):
            raise ConfigurationError("backoff must be one of tenacity's wait strategies, such as wait_fixed(5)")
        if self.undecodable not in ("retry", "reject"):
            raise ConfigurationError(f"undecodable must be 'retry' or 'reject', not {self.undecodable!r}")

    @property
    def lease_ms(self) -> int:
        """The lease in ms."""
        return milliseconds(self.lease)


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """
    The settings of one worker process, for `Consumer.run` and `Consumer.start`.

    Attributes:
        concurrency: how many calls of handlers run at once.
        grace: how long running handlers have after a stop (seconds or timedelta).
        max_jobs: messages that `Consumer.run` starts before the process is replaced, None for no limit.
        burst: stop when the queues are empty, but for messages that are due later; `delayed` waits for those too.
        allow_eviction: start although Redis may evict messages at `maxmemory`.
        log_error_text: log the texts of exceptions and the reasons of answers too; they may hold pieces of bodies.

    Example: `consumer.run(WorkerSettings(concurrency=32, grace=60))`
    """

    concurrency: int = 16
    grace: Duration = 25.0
    max_jobs: int | None = None
    burst: bool | Literal["delayed"] = False
    allow_eviction: bool = False
    log_error_text: bool = False

    def __post_init__(self) -> None:
        _check_ints(self, concurrency=(1, 10_000), max_jobs=(1, 10**9))
        _set_seconds(self, grace=(0.0, LONGEST_SECONDS))
        if self.burst not in (False, True, "delayed"):
            raise ConfigurationError(f"burst must be True, False or 'delayed', not {_format_value(self.burst)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    The limits that a queue declares, as keyword arguments of `Queue`; None is no limit.

    Attributes:
        ordered: one message of a key at a time, in the order in which they were published.
        per_key: at most this many messages of a key at once, over all processes (1..1,000,000).
        rate: how many messages may start in all: "100/s", "5/m" or "1000/h", at most 10,000 in a second.
        burst: how many of them at once after a pause; None for a tenth of a second's, and one at least.
        key_rate, key_burst: the same of each key.
        concurrency: at most this many messages at once, over all processes (1..1,000,000).
        key_weights: key -> how many messages it has in the turn in which others have one (1..1000, for 1000 keys).

    Raises:
        ConfigurationError: one of them is not allowed.
    """

    ordered: bool = False
    per_key: int | None = None
    rate: str | None = None
    burst: int | None = None
    key_rate: str | None = None
    key_burst: int | None = None
    concurrency: int | None = None
    key_weights: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.ordered, bool):
            raise ConfigurationError(f"ordered must be True or False, not {self.ordered!r:.40}")
        most = (1, HELD_LIMIT)
        _check_ints(self, per_key=most, concurrency=most, burst=most, key_burst=most)
        if self.ordered and self.per_key not in (None, 1):
            raise ConfigurationError(
                f"ordered=True is one message of a key at a time: leave out per_key, which is {self.per_key}"
            )
        for name, burst_name in (("rate", "burst"), ("key_rate", "key_burst")):
            if getattr(self, name) is not None:
                self.parse_rate(getattr(self, name), name)
            elif getattr(self, burst_name) is not None:
                raise ConfigurationError(
                    f"{burst_name} is for a rate: give {name} too, such as {name}='100/s', or leave it out"
                )
        given: object = self.key_weights
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"key_weights must be a mapping such as {{'vip': 4}}, not a {type(given).__name__}"
            )
        check_int("number of key_weights", len(given), most=WEIGHTS_LIMIT)
        weights = {
            check_key(key): check_int(f"weight of {key!r}", weight, least=1, most=WEIGHT_LIMIT)
            for key, weight in given.items()
        }
        object.__setattr__(self, "key_weights", weights)

    @staticmethod
    def parse_rate(text: str, name: str = "rate") -> int:
        """
        Return the microseconds between two starts of a rate such as "100/s", rounded up: no more may start than it says.

        Raises:
            ConfigurationError: it is not a rate; the message calls it `name`.
        """
        match = _RATE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigurationError(
                f"{name} must be a number of messages for each second, minute or hour, such as '100/s', '5/m' or "
                f"'1000/h', not {text!r:.40}"
            )
        number = int(match[1])
        unit_us = UNIT_US[match[2]]
        if number * 1_000_000 > STARTS_LIMIT * unit_us:
            raise ConfigurationError(
                f"{name} must be at most {STARTS_LIMIT}/s, not {text!r}: for more leave it out, or limit concurrency"
            )
        return -(-unit_us // number)

    def fields(self) -> dict[str, str]:
        """Return these limits as fields of the hash `limits`; its fields `on` and `declared` are written elsewhere."""
        fields: dict[str, int | None] = {
            "ordered": 1 if self.ordered else None,
            "per_key": 1 if self.ordered else self.per_key,
        }
        for rate, burst in (("rate", "burst"), ("key_rate", "key_burst")):
            if getattr(self, rate) is not None:
                us = self.parse_rate(getattr(self, rate))
                fields[f"{rate}_us"] = us
                fields[burst] = getattr(self, burst) or max(1, UNIT_US["s"] // (BURST_PART * us))
        fields["concurrency"] = self.concurrency
        fields["weighted"] = 1 if self.key_weights else None
        fields |= {WEIGHT_FIELD + key: weight for key, weight in self.key_weights.items()}
        return {name: str(value) for name, value in fields.items() if value is not None}

    @property
    def declaration(self) -> str:
        """The fingerprint of these limits: a worker writes its own when Redis has another one."""
        return sha256(msgspec.json.encode(sorted(self.fields().items()))).hexdigest()[:16]


class LimitOptions(TypedDict, total=False):
    """The fields of `reliq.settings.Limits` as keyword arguments of `Queue`, for type checkers."""

    ordered: bool
    per_key: int | None
    rate: str | None
    burst: int | None
    key_rate: str | None
    key_burst: int | None
    concurrency: int | None
    key_weights: Mapping[str, int]


LIMITS = frozenset(LimitOptions.__annotations__)


def limits_in(options: MutableMapping[str, Any], keys: Keys, shards: int | None) -> Limits | None:
    """
    Take the limits of a queue out of its keyword arguments; None when it declares none.

    Raises:
        ConfigurationError: one is not allowed, or the queue can have none.
    """
    given = {name: options.pop(name) for name in LIMITS & options.keys()}
    if not given:
        return None
    limits = Limits(**given)
    if not limits.fields():
        return None
    names = ", ".join(sorted(given))
    if keys.bare:
        raise ConfigurationError(
            f"{names}: a queue in the hdt3213 layout has no limits, for the Go original knows none"
        )
    if shards is not None and shards > 1:
        raise ConfigurationError(
            f"{names}: a queue of {shards} shards has no limits; leave `shards` out, or the limits"
        )
    return limits
