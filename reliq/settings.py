"""
The settings of queues, handlers, workers and limits, with their defaults and valid ranges.

A settings object checks its values when it is created. Users give durations as seconds or as a timedelta; this module
converts them to float seconds, and for Redis to whole milliseconds. Backoffs are wait strategies of tenacity.
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
from reliq.message import COST_LIMIT, RETRIES_LIMIT, Duration
from reliq.text import checking_keywords
from reliq.wire_format import check_key

if TYPE_CHECKING:
    from tenacity.wait import wait_base

    from reliq.keys import Keys


#: The default backoff of a handler: 1 to 3 s, 2 to 6 s, 4 to 12 s …, at most an hour. Twelve retries take about 2 h.
#: Up to two thirds of a wait is jitter, so that messages which fail together are not redelivered together.
DEFAULT_BACKOFF = wait_exponential(max=1800) + wait_random_exponential(multiplier=2, max=1800)

#: The wait after a failed attempt to use Redis, before the next attempt, in seconds.
RECONNECT = wait_exponential(multiplier=0.05, max=2) + wait_random(0, 0.1)

#: The default prefix of the outbox tables' names.
OUTBOX_PREFIX = "reliq_"
DAY_SECONDS = 86_400.0
#: The longest duration: ten years, in seconds.
LONGEST_SECONDS = 3650 * DAY_SECONDS
MIB = 1_048_576
#: The largest `max_body` of a queue, in bytes.
LARGEST_BODY = 16 * MIB
BATCH_LIMIT = 500
#: One round trip reads at most about this many bytes of bodies, to keep Redis and the process responsive.
READ_BYTES = 8 * MIB
#: If the requested bodies have more than this many bytes in total, the script `bodies` returns only their sizes.
INLINE_BYTES = 131_072
#: The shortest and the longest lease, in seconds.
LEASE_SECONDS = (0.05, DAY_SECONDS)
#: The default of `linger`: how long a batch waits to fill up, in seconds.
LINGER_SECONDS = 0.05
LONGEST_LINGER_SECONDS = 60.0
#: The highest rate limit, in messages started per second.
STARTS_LIMIT = 10_000
#: The highest rate limit by cost, in units of cost per second.
COST_RATE_LIMIT = 10_000_000
#: The highest limit for how many messages of a key or a queue run at the same time.
HELD_LIMIT = 1_000_000
WEIGHT_LIMIT = 1000
WEIGHTS_LIMIT = 1000
#: The default burst of a rate such as "100/s" is the number of messages that may start in 1 / BURST_PART of a second,
#: at least 1. The default burst of a rate by cost, such as "100000/m by cost", is the number in its text / BURST_PART.
BURST_PART = 10

#: The length of each time unit of a rate (second, minute, hour), in microseconds.
UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_RATE = re.compile(r"([1-9][0-9]{0,9})/([smh])( by cost)?")
#: A rate with this ending limits the sum of the messages' costs, not the number of messages.
BY_COST = " by cost"
#: The Redis hash `limits` has a field for the weight of each message key. Its name is this prefix and the key.
WEIGHT_FIELD = "weight:"


def seconds_after(backoff: wait_base, attempt: int) -> float:
    """
    Return how many seconds the wait strategy `backoff` waits after delivery number `attempt`, 1 for the first.

    A number above RETRIES_LIMIT + 1 counts as RETRIES_LIMIT + 1, because a wait strategy may compute 2**attempt.
    """
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = min(attempt, RETRIES_LIMIT + 1)
    return max(0.0, min(LONGEST_SECONDS, float(backoff(state))))


def seconds(name: str, value: Duration, *, least: float = 0.0, most: float = LONGEST_SECONDS) -> float:
    """
    Return a duration in seconds.

    Raises:
        ConfigurationError: the duration is not `least` to `most` seconds. The error names the option `name`.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number:  # noqa: PLR0124  NaN
        raise ConfigurationError(f"{name} must be seconds or a timedelta, not {_format_value(value)}")
    if not least <= number <= most:
        raise ConfigurationError(f"{name} must be {least:.10g} to {most:.10g} seconds, not {_format_value(number)}")
    return float(number)


def check_int(name: str, value: int, *, least: int = 0, most: int) -> int:
    """
    Return `value` if it is a whole number.

    Raises:
        ConfigurationError: it is not a whole number from `least` to `most`. The error names the option `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{name} must be a whole number, not {_format_value(value)}")
    if not least <= value <= most:
        raise ConfigurationError(f"{name} must be {least} to {most}, not {_format_value(value)}")
    return value


def check_is_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigurationError about the option `name` if `value` is not in `allowed`."""
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {str(value)[:40]!r}")


def _format_value(value: object) -> str:
    """Describe a wrong value for an error message: a number by its digits, any other value by its type."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def milliseconds(duration: Duration) -> int:
    """Convert a duration to whole milliseconds. Round up, so that no wait is too short."""
    number = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return math.ceil(number * 1000 - 1e-6)


def _check_ints(settings: Any, **bounds: tuple[int, int]) -> None:
    """Check that attributes of a settings object are whole numbers in `bounds`. If the default is None, allow None."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if value is not None or settings.__dataclass_fields__[name].default is not None:
            check_int(name, value, least=least, most=most)


def _set_seconds(settings: Any, **bounds: tuple[float, float]) -> None:
    """Convert durations of a frozen settings object to seconds, and check them. If the default is None, allow None."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if value is not None or settings.__dataclass_fields__[name].default is not None:
            object.__setattr__(settings, name, seconds(name, value, least=least, most=most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """
    Which replicas or disks must confirm a message before its publish returns.

    Create it with `Durability.replicas` or `Durability.aof`; `Durability.NONE` requires no confirmation. A message that
    is not confirmed in time stays published, and its `Receipt.durable` is False.

    Attributes:
        kind: "none", "replicas" (Redis' WAIT) or "aof" (Redis' WAITAOF).
        count: how many replicas must confirm.
        local: whether the append-only file of the Redis server itself must be on disk.
        timeout: how long a publish waits for confirmations, 0.001 to 60 s, in seconds or as a timedelta.

    Example: `Queue("orders", durability=Durability.replicas(1))`
    """

    kind: Literal["none", "replicas", "aof"] = "none"
    count: int = 0
    local: bool = False
    timeout: Duration = 0.5

    NONE: ClassVar[Durability]

    @classmethod
    def replicas(cls, count: int, timeout: Duration = 0.5) -> Self:
        """
        Require `count` replicas to have the message in memory.

        Args:
            count: how many replicas must confirm, 1 to 100.
            timeout: how long to wait, 0.001 to 60 s, in seconds or as a timedelta. Default: 0.5.

        Raises:
            ConfigurationError: `count` is not 1 to 100, or `timeout` not 0.001 to 60 seconds.
        """
        return cls(kind="replicas", count=check_int("replicas", count, least=1, most=100), timeout=timeout)

    @classmethod
    def aof(cls, *, local: bool = True, replicas: int = 0, timeout: Duration = 2.0) -> Self:
        """
        Require the message to be on disk (fsync), in append-only files. Needs Redis 7.2.

        With `appendfsync everysec` a confirmation can take more than a second.

        Args:
            local: whether the file of the Redis server itself must contain the message. Default: True.
            replicas: how many replicas must have the message in their files, 0 to 100. Default: 0.
            timeout: how long to wait, 0.001 to 60 s, in seconds or as a timedelta. Default: 2.

        Raises:
            ConfigurationError: the arguments require no confirmation, `replicas` is not 0 to 100, or `timeout` is not
                0.001 to 60 seconds.
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
        """Return `given`; raise ConfigurationError if it is not a `Durability`."""
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
    The settings of a queue, which are keyword arguments of `Queue`.

    Durations are seconds or timedelta.

    Attributes:
        retries: how many times a failed message is delivered again, 0 to 1,000. Default: 12.
        ttl: how long after its due time a message may still start; then it expires. Default: 7 days.
        max_body: the largest encoded body in bytes, up to 16 MiB. A publish refuses a larger body, and a worker does
            not load it. Default: 1 MiB.
        dedup: how long a chosen id cannot be published again after its message has ended. Default: 10 minutes.
        dead_letter_limit: how many dead letters are kept, up to 10,000,000. With 0, messages that fail for good are
            deleted. Default: 100,000.
        dead_letter_ttl: how long a dead letter is kept. Default: 7 days.
        keep_completed: how many of the last acked messages Redis remembers for lookups, up to 100,000. It always
            remembers the last 1,000 messages that ended in another way. Default: 0.
        durability: which replicas or disks must confirm a message before its publish returns. Default:
            `Durability.NONE`.
    """

    retries: int = 12
    ttl: Duration = 7 * DAY_SECONDS
    max_body: int = MIB
    dedup: Duration = 600.0
    dead_letter_limit: int = 100_000
    dead_letter_ttl: Duration = 7 * DAY_SECONDS
    keep_completed: int = 0
    durability: Durability = Durability.NONE

    def __post_init__(self) -> None:
        _check_ints(self, retries=(0, RETRIES_LIMIT), max_body=(1, LARGEST_BODY))
        _check_ints(self, dead_letter_limit=(0, 10_000_000), keep_completed=(0, 100_000))
        _set_seconds(
            self, ttl=(0.001, LONGEST_SECONDS), dedup=(0.0, LONGEST_SECONDS), dead_letter_ttl=(1.0, LONGEST_SECONDS)
        )
        Durability.checked(self.durability)


class SettingsOptions(TypedDict, total=False):
    """The fields of `QueueSettings` as keyword arguments, for type checkers."""

    retries: int
    ttl: Duration
    max_body: int
    dedup: Duration
    dead_letter_limit: int
    dead_letter_ttl: Duration
    keep_completed: int
    durability: Durability


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """
    The settings of a handler, which are keyword arguments of `Consumer.handler`.

    Durations are seconds or timedelta.

    Attributes:
        lease: the time after which a message of a dead worker is redelivered, 0.05 s to a day. Workers renew the lease
            while the handler runs. Default: 30 s.
        timeout: how long a handler may run; None for no limit. Default: 10 minutes.
        concurrency: how many calls of this handler may run at the same time in a process. Default: None, only the
            worker's own limit applies.
        weight: this queue's share of free slots, relative to the other queues, from 1 on. Default: 1.
        backoff: the wait between a failure and the next delivery, a wait strategy of tenacity. Default: exponential
            with jitter, about two hours for twelve retries.
        retry_on: exceptions after which the message is delivered again; after other exceptions it is rejected. Default:
            Exception.
        reject_on: exceptions after which the message is rejected, even if they are in `retry_on`. Default: none.
        on_decode_error: what to do with a message whose body cannot be decoded or is too large: "retry" redelivers it
            with backoff, "reject" makes it a dead letter immediately. Default: "retry".
        keep: how long Redis keeps the result of an acked message for `Queue.status`, from 1 s on. A result is the return
            value as JSON, at most 64 KiB. Not with `batch`. Default: None, keep no results.
        batch: the most messages in one handler call, 1 to 500. The handler then takes a list. Default: None, the
            handler takes one message.
        linger: how long a batch waits to fill up, 0 to 60 s; only with `batch`. Default: None, which means 0.05 s.
        batch_by_key: whether all messages of a batch must have the same message key. Messages without a key form
            separate batches. Only with `batch`. Default: False.

    Example: `@consumer.handler(orders, lease=60, timeout=timedelta(minutes=5), concurrency=4)`
    """

    lease: Duration = 30.0
    timeout: Duration | None = 600.0
    concurrency: int | None = None
    weight: int = 1
    backoff: wait_base = field(default=DEFAULT_BACKOFF)
    retry_on: tuple[type[Exception], ...] = (Exception,)
    reject_on: tuple[type[Exception], ...] = ()
    on_decode_error: Literal["retry", "reject"] = "retry"
    keep: Duration | None = None
    batch: int | None = None
    linger: Duration | None = None
    batch_by_key: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.batch_by_key, bool):
            raise ConfigurationError(f"batch_by_key must be True or False, not {_format_value(self.batch_by_key)}")
        if self.batch is None and self.batch_by_key:
            raise ConfigurationError(
                "batch_by_key is for batches: give batch too, such as batch=100, or leave out batch_by_key"
            )
        if self.batch is None and self.linger is not None:
            raise ConfigurationError("linger is for batches: give batch too, such as batch=100, or leave out linger")
        if self.batch is not None and self.keep is not None:
            raise ConfigurationError("keep is for handlers of one message: leave out either keep or batch")
        _check_ints(self, batch=(1, BATCH_LIMIT), concurrency=(1, 10_000), weight=(1, WEIGHT_LIMIT))
        _set_seconds(self, lease=LEASE_SECONDS, linger=(0.0, LONGEST_LINGER_SECONDS), keep=(1.0, LONGEST_SECONDS))
        if self.timeout is not None:
            _set_seconds(self, timeout=(0.001, LONGEST_SECONDS))
        for name in ("retry_on", "reject_on"):
            given = getattr(self, name)
            kinds = given if isinstance(given, tuple) else (given,)
            if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
                raise ConfigurationError(f"{name} must be an exception class or a tuple of exception classes")
            object.__setattr__(self, name, kinds)
        if not callable(self.backoff):
            raise ConfigurationError("backoff must be one of tenacity's wait strategies, such as wait_fixed(5)")
        if self.on_decode_error not in ("retry", "reject"):
            raise ConfigurationError(f"on_decode_error must be 'retry' or 'reject', not {self.on_decode_error!r}")

    @property
    def lease_ms(self) -> int:
        """The length of the lease in milliseconds."""
        return milliseconds(self.lease)


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """
    The settings of one worker process, for `Consumer.run` and `Consumer.start`.

    Attributes:
        concurrency: how many handler calls run at the same time. Default: 16.
        grace: how long running handlers may continue during a graceful shutdown, in seconds or as a timedelta. Default:
            25.
        max_jobs: after it has started this many messages, `Consumer.run` returns, so that a supervisor can replace the
            process. Default: None, no limit.
        burst: True stops the worker when all messages that are left are due later; "delayed" stops it when the queues
            are empty. Default: False.
        allow_eviction: start even if Redis may evict messages at `maxmemory`. Default: False.
        log_error_text: log the texts of exceptions and the reasons that handlers give, for example to `Nack`. These
            texts may contain parts of message bodies. Default: False.

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
    The order, concurrency and rate limits of a queue, which are keyword arguments of `Queue`.

    Attributes:
        ordered: True runs the messages of each key one at a time, in publish order. Default: False.
        per_key: how many messages of a key may run at the same time, over all workers, 1 to 1,000,000. Default: None,
            no limit.
        rate: how many messages may start per second, minute or hour: "100/s", "5/m" or "1000/h", at most 10,000 per
            second. A rate such as "100000/m by cost" limits the sum of the messages' costs, at most 10,000,000 per
            second. A list may contain one rate of each kind. Default: None, no limit.
        burst: how many messages may start at the same time after a pause; for a rate by cost, the sum of their costs.
            If `rate` is a list, give a list with one number for each rate. Default: None, the number of messages that
            `rate` allows in 0.1 s, at least 1; for a rate by cost, a tenth of the number in it.
        key_rate: like `rate`, for the messages of each key. Default: None.
        key_burst: like `burst`, for `key_rate`. Default: None.
        concurrency: how many messages of the queue may run at the same time, over all workers, 1 to 1,000,000. Default:
            None, no limit.
        key_weights: the weights of up to 1,000 keys, 1 to 1,000. Workers start waiting messages of a key with weight 4
            four times as often as messages of a key with weight 1. Other keys have weight 1.

    Raises:
        ConfigurationError: a limit is not valid.
    """

    ordered: bool = False
    per_key: int | None = None
    rate: str | Sequence[str] | None = None
    burst: int | Sequence[int | None] | None = None
    key_rate: str | None = None
    key_burst: int | None = None
    concurrency: int | None = None
    key_weights: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.ordered, bool):
            raise ConfigurationError(f"ordered must be True or False, not {self.ordered!r:.40}")
        most = (1, HELD_LIMIT)
        _check_ints(self, per_key=most, concurrency=most)
        if self.ordered and self.per_key not in (None, 1):
            raise ConfigurationError(
                f"ordered=True runs one message of a key at a time: leave out per_key, which is {self.per_key}"
            )
        for name in ("rate", "burst"):
            given_list: object = getattr(self, name)
            if isinstance(given_list, list | tuple):
                object.__setattr__(self, name, given_list[0] if len(given_list) == 1 else tuple(given_list) or None)
        self._buckets()
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

    def _buckets(self) -> dict[str, int]:
        """
        Return the rates and bursts as fields of the Redis hash `limits`.

        Raises:
            ConfigurationError: a rate or a burst is not valid.
        """
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        bursts = self.burst if isinstance(self.burst, tuple) else (self.burst,)
        if len(bursts) != len(rates) and self.burst is not None:
            raise ConfigurationError(
                f"burst must have one number for each rate, such as rate=['60/m', '100000/m by cost'], burst=[10, 10_000], "
                f"not {self.burst!r:.40} for {self.rate!r:.80}"
            )
        fields: dict[str, int] = {}
        pairs = zip(rates, bursts if self.burst is not None else [None] * len(rates), strict=True)
        for name, rate, burst in [*(("rate", *pair) for pair in pairs), ("key_rate", self.key_rate, self.key_burst)]:
            burst_name = name.replace("rate", "burst")
            if rate is None and burst is not None:
                raise ConfigurationError(
                    f"{burst_name} is for a rate: give {name} too, such as {name}='100/s', or leave out {burst_name}"
                )
            if rate is None:
                continue
            is_cost = name == "rate" and isinstance(rate, str) and rate.endswith(BY_COST)
            every = self.parse_rate(rate, name, by_cost=is_cost)
            field, burst_field = ("cost_ns", "cost_burst") if is_cost else (f"{name}_us", burst_name)
            if field in fields:
                raise ConfigurationError(f"rate takes one rate of starts and one rate by cost, not {self.rate!r:.80}")
            usual = int(rate.partition("/")[0]) // BURST_PART if is_cost else UNIT_US["s"] // (BURST_PART * every)
            fields[field] = every
            if burst is not None:
                check_int(burst_name, burst, least=1, most=COST_LIMIT if is_cost else HELD_LIMIT)
            fields[burst_field] = burst or max(1, usual)
        return fields

    @staticmethod
    def parse_rate(text: str, name: str = "rate", *, by_cost: bool = False) -> int:
        """
        Parse a rate such as "100/s"; return the microseconds between two messages, rounded up.

        With `by_cost`, parse a rate such as "100000/m by cost"; return the nanoseconds between two units of cost.

        Raises:
            ConfigurationError: `text` is not a valid rate; the error message uses `name`.
        """
        match = _RATE.fullmatch(text) if isinstance(text, str) else None
        if match is None or (match[3] and not by_cost):
            raise ConfigurationError(
                f"{name} must be a number of messages for each second, minute or hour, such as '100/s', '5/m' or "
                f"'1000/h', not {text!r:.40}"
            )
        number = int(match[1])
        unit_us = UNIT_US[match[2]]
        most = COST_RATE_LIMIT if by_cost else STARTS_LIMIT
        if number * 1_000_000 > most * unit_us:
            raise ConfigurationError(
                f"{name} must be at most {most}/s, not {text!r}: for a higher rate, leave {name} out or set concurrency"
            )
        return -(-unit_us * (1000 if by_cost else 1) // number)

    def fields(self) -> dict[str, str]:
        """
        Return these limits as fields of the Redis hash `limits`.

        The hash also has fields that only scripts write, such as `on` and `declared`.
        """
        fields: dict[str, int | None] = {
            "ordered": 1 if self.ordered else None,
            "per_key": 1 if self.ordered else self.per_key,
        }
        fields |= self._buckets()
        fields["concurrency"] = self.concurrency
        fields["weighted"] = 1 if self.key_weights else None
        fields |= {WEIGHT_FIELD + key: weight for key, weight in self.key_weights.items()}
        return {name: str(value) for name, value in fields.items() if value is not None}

    @property
    def declaration(self) -> str:
        """The fingerprint of these limits. If Redis has another fingerprint, a worker writes its limits to Redis."""
        return sha256(msgspec.json.encode(sorted(self.fields().items()))).hexdigest()[:16]


class LimitOptions(TypedDict, total=False):
    """The fields of `reliq.settings.Limits` as keyword arguments of `Queue`, for type checkers."""

    ordered: bool
    per_key: int | None
    rate: str | Sequence[str] | None
    burst: int | Sequence[int | None] | None
    key_rate: str | None
    key_burst: int | None
    concurrency: int | None
    key_weights: Mapping[str, int]


LIMITS = frozenset(LimitOptions.__annotations__)


def limits_in(options: MutableMapping[str, Any], keys: Keys, shards: int | None) -> Limits | None:
    """
    Remove the limits from the keyword arguments of a queue; return them, or None if there are no limits.

    Raises:
        ConfigurationError: a limit is not valid, or the queue cannot have limits.
    """
    given = {name: options.pop(name) for name in LIMITS & options.keys()}
    if not given:
        return None
    limits = Limits(**given)
    if not limits.fields():
        return None
    names = ", ".join(sorted(given))
    if keys.bare or (shards or 1) > 1:
        cause, option = ("in the hdt3213 layout", "layout") if keys.bare else (f"of {shards} shards", "shards")
        raise ConfigurationError(f"{names}: a queue {cause} cannot have limits; leave out `{option}` or the limits")
    return limits
