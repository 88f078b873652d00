"""Every setting: its default, its unit and what is allowed; each is checked when it is made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self, TypedDict

from tenacity.wait import wait_base

from reliq.errors import ConfigurationError
from reliq.keywords import checking_keywords
from reliq.message import RETRIES_LIMIT, Duration
from reliq.retry import DEFAULT_BACKOFF

DAY_SECONDS = 86_400.0
LONGEST_SECONDS = 3650 * DAY_SECONDS
MIB = 1_048_576
#: No queue allows larger bodies, in bytes.
LARGEST_BODY = 16 * MIB
BATCH_LIMIT = 500
#: One round trip brings no more bytes of bodies than about this: neither Redis nor the process is held up for long.
READ_BYTES = 8 * MIB
#: Bodies that have no more bytes together come in the first round trip; of larger ones it brings the sizes.
INLINE_BYTES = 131_072
LINGER_SECONDS, LONGEST_LINGER_SECONDS = 0.05, 60.0


def seconds(name: str, value: Duration, *, least: float = 0.0, most: float = LONGEST_SECONDS) -> float:
    """Return a duration in seconds; raise ConfigurationError naming `name` when it is outside `least`..`most`."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number:  # noqa: PLR0124  NaN
        raise ConfigurationError(f"{name} must be seconds or a timedelta, not {_shown(value)}")
    if not least <= number <= most:
        raise ConfigurationError(f"{name} must be {least:.10g} to {most:.10g} seconds, not {_shown(number)}")
    return float(number)


def whole(name: str, value: int, *, least: int = 0, most: int) -> int:
    """Return a whole number; raise ConfigurationError naming `name` when it is outside `least`..`most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{name} must be a whole number, not {_shown(value)}")
    if not least <= value <= most:
        raise ConfigurationError(f"{name} must be {least} to {most}, not {_shown(value)}")
    return value


def check_is_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigurationError naming `name` when a value is none of those that are allowed."""
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {str(value)[:40]!r}")


def _shown(value: object) -> str:
    """Return a number as text, unless it is too long to be read, and the type of anything else."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def lease_seconds(value: Duration) -> float:
    """Return the length of a lease in seconds; raise ConfigurationError when it is not allowed."""
    return seconds("lease", value, least=0.05, most=DAY_SECONDS)


def milliseconds(duration: Duration) -> int:
    """Return seconds as whole milliseconds, rounded up: a wait is never cut short."""
    number = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return math.ceil(number * 1000 - 1e-6)


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

    NONE: ClassVar["Durability"]

    @classmethod
    def replicas(cls, count: int, timeout: Duration = 0.5) -> Self:
        """
        Wait until `count` replicas have the message in memory, at most `timeout` (seconds or timedelta).

        Raises:
            ConfigurationError: `count` is not 1 to 100, or `timeout` not 0.001 to 60 seconds.
        """
        return cls(kind="replicas", count=whole("replicas", count, least=1, most=100), timeout=timeout)

    @classmethod
    def aof(cls, *, local: bool = True, replicas: int = 0, timeout: Duration = 2.0) -> Self:
        """
        Wait until the message is on disk (fsync): in the server's own append-only file, in those of `replicas`, or both.

        It needs Redis 7.2. With `appendfsync everysec` a confirmation takes up to a second and more.

        Raises:
            ConfigurationError: nobody is to confirm, `replicas` is not 0 to 100, or `timeout` not 0.001 to 60 seconds.
        """
        if not isinstance(local, bool):
            raise ConfigurationError(f"local must be True or False, not {_shown(local)}")
        if not local and not whole("replicas", replicas, most=100):
            raise ConfigurationError("durability by aof needs local=True, or replicas=1 or more")
        return cls(kind="aof", count=whole("replicas", replicas, most=100), local=local, timeout=timeout)

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", seconds("timeout", self.timeout, least=0.001, most=60.0))

    @classmethod
    def checked(cls, given: Any) -> "Durability":
        """Return `given` when it is a Durability; raise ConfigurationError for anything else."""
        if not isinstance(given, Durability):
            raise ConfigurationError(
                f"durability must be Durability.replicas(1), Durability.aof() or Durability.NONE, not {_shown(given)}"
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
        whole("retries", self.retries, most=RETRIES_LIMIT)
        whole("max_body", self.max_body, least=1, most=LARGEST_BODY)
        whole("letters_max", self.letters_max, most=10_000_000)
        whole("history", self.history, most=100_000)
        _normalise(self, ttl=0.001, dedup=0.0, letters_ttl=1.0)
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


@checking_keywords
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
        reject_on: exceptions after which the message is rejected, also those of `retry_on`.
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
        object.__setattr__(self, "lease", lease_seconds(self.lease))
        self._check_batch()
        if self.timeout is not None:
            _normalise(self, timeout=0.001)
        if self.concurrency is not None:
            whole("concurrency", self.concurrency, least=1, most=10_000)
        whole("weight", self.weight, least=1, most=1000)
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

    def _check_batch(self) -> None:
        if not isinstance(self.batch_by_key, bool):
            raise ConfigurationError(f"batch_by_key must be True or False, not {_shown(self.batch_by_key)}")
        if self.batch is None and self.batch_by_key:
            raise ConfigurationError("batch_by_key is for batches: give batch too, such as batch=100, or leave it out")
        if self.batch is None and self.linger is not None:
            raise ConfigurationError("linger is for batches: give batch too, such as batch=100, or leave it out")
        if self.batch is not None:
            whole("batch", self.batch, least=1, most=BATCH_LIMIT)
        if self.linger is not None:
            object.__setattr__(self, "linger", seconds("linger", self.linger, most=LONGEST_LINGER_SECONDS))


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
        whole("concurrency", self.concurrency, least=1, most=10_000)
        _normalise(self, grace=0.0)
        if self.burst not in (False, True, "delayed"):
            raise ConfigurationError(f"burst must be True, False or 'delayed', not {_shown(self.burst)}")
        if self.max_jobs is not None:
            whole("max_jobs", self.max_jobs, least=1, most=10**9)


def _normalise(settings: Any, **least: float) -> None:
    """Turn the named durations of a frozen settings object into float seconds, checked."""
    for name, at_least in least.items():
        object.__setattr__(settings, name, seconds(name, getattr(settings, name), least=at_least))
