"""Periodic entries: which queue gets a message at which ticks, with which body, registered by `cron` and `every`."""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, get_args, overload

from reliq.errors import ConfigurationError
from reliq.ids import run_id, tick_id
from reliq.keywords import check_keywords
from reliq.publish.orders import Writer
from reliq.queue import Queue
from reliq.schedule import Schedule
from reliq.settings import DAY_SECONDS, check_is_one_of, milliseconds, seconds
from reliq.transitions import Tick

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from reliq.message import Duration

B = TypeVar("B")
F = TypeVar("F", bound="Callable[..., Any]")

CatchUp = Literal["skip", "once", "all"]
Overlap = Literal["allow", "skip"]

#: The header of a tick's message: the tick in ISO 8601.
TICK_HEADER = "reliq-tick"
#: A tick that comes no later than so many seconds is on time, not made up for.
ON_TIME_SECONDS = 60.0
#: One step looks at this many ticks of an entry; after a long absence it takes several.
STEP_TICKS = 100

#: Stands for a body that a decorated function makes.
_FROM_FUNCTION = object()
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class PeriodicOptions(TypedDict, total=False):
    """The options that `cron` and `every` share; the defaults are those of `Periodic`."""

    jitter: Duration
    catch_up: CatchUp
    within: Duration
    overlap: Overlap


#: The keyword arguments of `Consumer.cron`.
_KEYWORDS = frozenset({"queue", "body", "name", "tz", *PeriodicOptions.__annotations__})


class Makes(Protocol[B]):
    """The decorator that `cron` and `every` return without a body; it leaves the function as it is."""

    def __call__(self, function: Callable[[datetime], B], /) -> Callable[[datetime], B]:
        """Register the function that makes the body."""


class Planned(NamedTuple):
    """A tick to settle, in unix seconds: up to which tick all is done, how many are missed, whether it is published."""

    at: int
    since: int
    missed: int
    is_published: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """
    One periodic entry.

    Attributes:
        body: what its messages carry, or a function that makes it from the tick, an aware datetime.
        jitter: each message is due up to so many seconds after its tick; the same for a tick in every process.
        catch_up: which ticks are made up for that passed while no process was there: none, the last, or all.
        within: seconds after which a tick is not made up for.
        overlap: `skip` publishes nothing while the entry's last message is alive.
    """

    name: str
    queue: Queue[Any]
    schedule: Schedule
    body: Any
    jitter: Duration = 0.0
    catch_up: CatchUp = "once"
    within: Duration = DAY_SECONDS
    overlap: Overlap = "allow"
    _writer: Writer = field(init=False, repr=False)
    _jitter_ms: int = field(init=False, repr=False)
    _within_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise ConfigurationError(
                f"a periodic entry's name must be 1 to 100 of A-Z a-z 0-9 _ . - , not {str(self.name)[:80]!r}"
            )
        if not isinstance(self.queue, Queue):
            raise ConfigurationError(f"queue of {self} must be a Queue, not {type(self.queue).__name__}")
        if inspect.iscoroutinefunction(self.body):
            raise ConfigurationError(f"the function that makes the body of {self} must be plain: nobody awaits it")
        check_is_one_of("catch_up", self.catch_up, get_args(CatchUp))
        check_is_one_of("overlap", self.overlap, get_args(Overlap))
        within = seconds("within", self.within, least=ON_TIME_SECONDS)
        derived = {
            "_jitter_ms": milliseconds(seconds("jitter", self.jitter, most=DAY_SECONDS)),
            "_within_seconds": ON_TIME_SECONDS if self.catch_up == "skip" else within,
            "_writer": Writer(self.queue.known_shards, self.queue.codec, self.queue.settings),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if not callable(self.body):
            self.run(0)  # a body that cannot be sent is refused now

    def __str__(self) -> str:
        return f"periodic entry {self.name!r}"

    def plan(self, last: int, now: int) -> list[Planned]:
        """
        Return what is to be settled `now` when all is done up to the tick `last`, in unix seconds, oldest first.

        After a long absence it is the beginning of that, of STEP_TICKS ticks.
        """
        ticks = self.schedule.ticks(last, now, most=STEP_TICKS + 1)
        newest, ticks = ticks[-1:], ticks[:STEP_TICKS]
        planned, missed = list[Planned](), 0
        for tick in ticks:
            if now - tick <= self._within_seconds and (self.catch_up == "all" or [tick] == newest):
                planned.append(Planned(tick, last, missed, is_published=True))
                last, missed = tick, 0
            else:
                missed += 1
        if missed:
            planned.append(Planned(ticks[-1], last, missed, is_published=False))
        return planned

    def tick(self, planned: Planned) -> Tick:
        """Return what settles a tick; raise what its body raises."""
        one = Tick(self.name, str(self.schedule), planned.at, planned.since, planned.missed)
        if planned.is_published:
            due_ms = planned.at * 1000 + self._shift_ms(planned.at)
            message = self._message(tick_id(self.name, planned.at), planned.at)
            return replace(one, message=message, due_ms=due_ms, overlap=self.overlap)
        return one

    def run(self, asked_ms: int) -> Tick:
        """Return the run that somebody asked for; raise what its body raises."""
        at = asked_ms // 1000
        message = self._message(run_id(self.name, asked_ms), at)
        return Tick(self.name, str(self.schedule), at, at, message=message, asked=asked_ms)

    def _message(self, id: str, at: int) -> tuple[str, bytes]:
        """Return id and value of a message; the id is its own alone, so that it need not stay taken after its end."""
        moment = self.schedule.moment(at)
        body = self.body(moment) if callable(self.body) else self.body
        headers = {} if self.queue.keys.bare else {TICK_HEADER: moment.isoformat()}
        order = self._writer.order(body, {"id": id, "dedup": 0, "headers": headers})
        return order.id, order.value

    def _shift_ms(self, at: int) -> int:
        """Return by how many ms the message of a tick is due later: as by chance, and the same in every process."""
        digest = hashlib.sha256(f"{self.name} {at}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % (self._jitter_ms + 1)


class PeriodicRegistration:
    """The periodic entries of a consumer, by their names."""

    def __init__(self) -> None:
        self._periodic: dict[str, Periodic] = {}

    @property
    def periodic(self) -> Sequence[Periodic]:
        """The registered periodic entries."""
        return tuple(self._periodic.values())

    @overload
    def cron(
        self, expression: str, *, queue: Queue[B], name: str = "", tz: str = "UTC", **options: Unpack[PeriodicOptions]
    ) -> Makes[B]: ...

    @overload
    def cron(
        self,
        expression: str,
        *,
        queue: Queue[B],
        body: B | Callable[[datetime], B],
        name: str,
        tz: str = "UTC",
        **options: Unpack[PeriodicOptions],
    ) -> None: ...

    def cron(
        self,
        expression: str,
        *,
        queue: Queue[Any],
        body: Any = _FROM_FUNCTION,
        name: str = "",
        tz: str = "UTC",
        **options: Unpack[PeriodicOptions],
    ) -> Any:
        """
        Have a message published at each tick of a cron expression, by whichever process of the consumer comes first.

        With `body` it registers the entry at once. Without, it decorates the function that makes the body from the tick,
        an aware datetime in `tz`; every process may call it, more than once for a tick, so it must be quick and only
        compute. A message's id is `cron.NAME.UNIX`, its header `reliq-tick` has the tick in ISO 8601.

        Args:
            expression: minute, hour, day of the month, month, day of the week; in UTC, or the time zone `tz`.
            queue: gets the messages, on its terms; its handler may be another consumer's.
            body: a value of the queue's type, or a function that makes one from the tick.
            name: 1 to 100 of A-Z a-z 0-9 _ . -, which no other entry has; of a decorated function its own by default.
            tz: the name of a time zone, such as Europe/Berlin.
            jitter: seconds or timedelta up to which each message is due later than its tick (0).
            catch_up: which ticks are made up for that passed while no process was there: `skip` for none, `once` for
                the last one (the default), `all`.
            within: seconds or timedelta after which a tick is not made up for (a day).
            overlap: `skip` publishes nothing while the entry's last message is alive (`allow`).

        Raises:
            ConfigurationError: an argument is not allowed, or another entry has that name.
            BodyError: the body cannot be encoded.

        Example:
            @consumer.cron("0 6 * * *", queue=reports, tz="Europe/Berlin")
            def daily_report(tick: datetime) -> Report:
                return Report(day=tick.date())
        """
        check_keywords("Consumer.cron", options, _KEYWORDS)
        return self._enter(Schedule.cron(expression, tz), queue, body, name, options)

    @overload
    def every(
        self, interval: Duration, *, queue: Queue[B], name: str = "", **options: Unpack[PeriodicOptions]
    ) -> Makes[B]: ...

    @overload
    def every(
        self,
        interval: Duration,
        *,
        queue: Queue[B],
        body: B | Callable[[datetime], B],
        name: str,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...

    def every(
        self,
        interval: Duration,
        *,
        queue: Queue[Any],
        body: Any = _FROM_FUNCTION,
        name: str = "",
        **options: Unpack[PeriodicOptions],
    ) -> Any:
        """
        As `cron`, at equal intervals of whole seconds, counted from 1970 in UTC: every 5 minutes is 12:00, 12:05, ….

        Example: `consumer.every(timedelta(minutes=5), queue=checks, body=Check("all"), name="checks")`
        """
        check_keywords("Consumer.every", options, _KEYWORDS - {"tz"})
        return self._enter(Schedule.every(interval), queue, body, name, options)

    def _enter(self, schedule: Schedule, queue: Queue[Any], body: Any, name: str, options: PeriodicOptions) -> Any:
        if body is not _FROM_FUNCTION:
            return self._add(Periodic(name=name, queue=queue, schedule=schedule, body=body, **options))

        def register(function: F) -> F:
            if not callable(function):
                raise ConfigurationError(f"the function that makes a body must be one, not a {type(function).__name__}")
            called = name or getattr(function, "__name__", "")
            self._add(Periodic(name=called, queue=queue, schedule=schedule, body=function, **options))
            return function

        return register

    def _add_all_of(self, other: PeriodicRegistration) -> None:
        """Register what `other` has too; raise ConfigurationError, and add none, when two entries would have one name."""
        for entry in other.periodic:
            self._check_name_is_free(entry)
        self._periodic.update(other._periodic)

    def _add(self, entry: Periodic) -> None:
        self._check_name_is_free(entry)
        self._periodic[entry.name] = entry

    def _check_name_is_free(self, entry: Periodic) -> None:
        if entry.name in self._periodic:
            raise ConfigurationError(f"two periodic entries are called {entry.name!r}; give one of them another name=")
