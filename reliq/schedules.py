"""
Schedules that `Queue.schedule` stores in Redis, and the format in which Redis stores them.

Shard 0 of a queue has the Redis hash `plans`, in which each schedule has a field. Its value (the schedule's row) is
`REVISION PAUSE`, a line feed, a JSON object (`PlanOptions`), a line feed, and the encoded message without the start of
its envelope. The revision is a hash of everything after the first line. The sorted set `plans_due` has the next tick
(due time) of each schedule that is not paused. The scripts `plan` and `plan_tick` write the hash and the sorted set.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.lua import transitions
from reliq.message import MessageOptions, OutgoingMessage
from reliq.publish import registration
from reliq.redis.commands import Command, id_text, read_pause
from reliq.schedule import CatchUp, Schedule
from reliq.settings import LONGEST_SECONDS, check_int, check_is_one_of
from reliq.text import check_keywords, clamp_time
from reliq.wire_format import ENVELOPE_START, open_envelope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from reliq.keys import Keys
    from reliq.message import Duration, Header, Pause
    from reliq.publish import PreparedMessage, Writer
    from reliq.redis.client import Clients
    from reliq.redis.connection import Driver

#: The largest message of a schedule, header and body, in bytes. It is small, because a worker reads the messages of up
#: to PAGE due schedules at once.
LARGEST_BYTES = 65_536
#: About how many schedules one round trip reads.
PAGE = 100
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_GLOB = re.compile(r"[*?\[\]\\]")


class ScheduleOptions(MessageOptions, total=False):
    """The options of `Queue.schedule`, for type checkers."""

    cron: str | None
    every: Duration | None
    tz: str
    catch_up: CatchUp


_KEYWORDS = frozenset({"body", *ScheduleOptions.__annotations__})


class PlanOptions(msgspec.Struct, frozen=True):
    """The options of a schedule that its row in Redis contains as a JSON object."""

    schedule: str
    catch_up: CatchUp
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=int(LONGEST_SECONDS * 1000))]


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """
    A schedule that `Queue.schedule` has stored.

    Attributes:
        name: the name of the schedule.
        schedule: a cron expression and its time zone, or `every` and the seconds; empty if this version of reliq cannot
            read the schedule.
        tz: the name of the time zone.
        next: the next tick, in unix seconds; None while the schedule is paused, or if there is no further tick.
        pause: who paused it, when and why; None if it is not paused.
        body_bytes: the size of the encoded body.
        catch_up: which missed ticks are published: `skip`, `latest` or `all`.
    """

    name: str
    schedule: str
    tz: str
    next: int | None
    pause: Pause | None
    body_bytes: int
    catch_up: CatchUp


class Row(NamedTuple):
    """The parsed row of a schedule, a value of the Redis hash `plans`."""

    revision: str
    pause: bytes
    options: PlanOptions
    header: Header
    body: bytes

    @classmethod
    def parse(cls, row: bytes) -> Row:
        """Parse a row; raise ValueError if it is not valid, for example because a newer version wrote it."""
        first, options, value = row.split(b"\n", 2)
        revision, pause = first.decode().split(" ", 1)
        header, body = open_envelope(ENVELOPE_START.encode() + b"0" + value)
        if header.retries is None:
            raise ValueError("the message of the row has no envelope")
        if re.fullmatch("[0-9a-f]+", revision) is None:
            raise ValueError("the revision of the row is not hexadecimal")
        return cls(revision, pause.encode(), msgspec.json.decode(options, type=PlanOptions), header, body)


def check_name(keys: Keys, name: object) -> str:
    """Check and return a schedule's name; raise ConfigurationError if it is invalid, or the queue has the Go layout."""
    if keys.bare:
        raise ConfigurationError(
            f"queue {keys.name!r} in the layout {keys.layout} has no stored schedules: programs in Go would not see them; use "
            "Consumer.cron"
        )
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"a schedule's name must be 1 to 100 of A-Z a-z 0-9 _ . - , not {str(name)[:80]!r}")
    return name


def schedule_of(cron: str | None, every: Duration | None, tz: str) -> Schedule:
    """Return the `Schedule` for `cron` or `every`; raise ConfigurationError if both or neither are given."""
    if (cron is None) == (every is None):
        raise ConfigurationError("give cron='0 6 * * *' or every=60, and not both")
    if every is None:
        return Schedule.cron(cron, tz)  # type: ignore[arg-type]
    if tz != "UTC":
        raise ConfigurationError("tz is for cron only: the ticks of every= count from 1970 in UTC")
    return Schedule.every(every)


def encoded(
    writer: Writer, schedule: Schedule, body: Any, catch_up: CatchUp, options: MessageOptions
) -> tuple[bytes, PreparedMessage]:
    """
    Encode a schedule. Return its row in Redis without the first line, and the schedule's message.

    Raises:
        ConfigurationError: an option is not valid, or the message is larger than LARGEST_BYTES.
        BodyError: the body cannot be encoded or is too large.
    """
    check_is_one_of("catch_up", catch_up, get_args(CatchUp))
    order = writer.special(OutgoingMessage(body=body, **options))
    if len(order.value) > LARGEST_BYTES:
        raise ConfigurationError(
            f"body and headers of a schedule must be at most {LARGEST_BYTES} bytes, not {len(order.value)}: store the data "
            "elsewhere, and give its id"
        )
    text = msgspec.json.encode(PlanOptions(str(schedule), catch_up, order.terms.ttl_ms))
    return text + b"\n" + order.value, order


def revision_of(rest: bytes) -> str:
    """Return the revision of a schedule: a hash of its row without the first line."""
    return sha256(rest).hexdigest()[:16]


def page(keys: Keys, cursor: int, prefix: str) -> Command[tuple[int, dict[str, bytes]]]:
    """
    Return the command that reads a page of the schedules whose names begin with `prefix`.

    The command returns the cursor of the next page (0 after the last page), and the rows by schedule name.
    """
    wanted = _GLOB.sub(r"\\\g<0>", prefix) + "*"

    def read(reply: Any) -> tuple[int, dict[str, bytes]]:
        return int(reply[0]), dict(zip(map(id_text, reply[1][::2]), reply[1][1::2], strict=True))

    return Command(("HSCAN", keys.plans, cursor, "MATCH", wanted, "COUNT", PAGE), read)


def next_ticks(keys: Keys, names: Sequence[str]) -> Command[list[int | None]]:
    """Return the command that reads the next tick of each named schedule."""
    return Command(
        ("ZMSCORE", keys.plans_due, *names), lambda reply: [None if at is None else int(clamp_time(at)) for at in reply]
    )


def stored(name: str, row: bytes, next: int | None) -> StoredSchedule:
    """Return the `StoredSchedule` for a row in Redis; some fields are empty if this version cannot parse the row."""
    try:
        known = Row.parse(row)
    except ValueError:
        return StoredSchedule(name, "", "", next, None, len(row), "latest")
    text = known.options.schedule
    tz = "UTC" if text.startswith("every") else text.rpartition(" ")[2]
    pause = read_pause(known.pause) if known.pause else None
    return StoredSchedule(name, text, tz, next, pause, len(known.body), known.options.catch_up)


class StoredSchedules:
    """
    Write, read, pause and delete the stored schedules of a queue, for `Queue.schedule` and related methods.

    Args:
        writer, clients: used only by `write`.
        ask: a function that sends a command or script call with a blocking or async driver, and returns the parsed
            reply.
    """

    def __init__(
        self, keys: Keys, writer: Writer, clients: Clients, ask: Callable[[Driver, Any], Awaitable[Any]]
    ) -> None:
        self._keys = keys
        self._writer = writer
        self._clients = clients
        self._ask = ask

    async def write(self, driver: Driver, name: str, body: Any, options: ScheduleOptions) -> None:
        """Store a schedule, or replace the schedule with the same name."""
        check_name(self._keys, name)
        check_keywords("Queue.schedule", options, _KEYWORDS)
        schedule = schedule_of(options.pop("cron", None), options.pop("every", None), options.pop("tz", "UTC"))
        rest, order = encoded(self._writer, schedule, body, options.pop("catch_up", "latest"), options)
        if (naming := registration(self._keys, self._clients)) is not None:
            with suppress(RedisRefusedError):
                await self._ask(driver, naming)
        answer = "superseded"
        while answer == "superseded":  # the tick passed before Redis ran the script, so compute the next tick again
            next = await self._next(driver, schedule)
            call = transitions.plan(
                self._keys, "write", name, revision=revision_of(rest), next=next, line=order.line, value=rest
            )
            answer = await self._ask(driver, call)
        if answer == "sharded":
            raise ConfigurationError(
                f"queue {self._keys.name!r} has several shards: keys and priorities need a queue of one shard"
            )

    async def change(self, driver: Driver, verb: Literal["delete", "pause"], name: str, value: bytes = b"") -> bool:
        """Delete or pause a schedule; return whether this call deleted or paused it."""
        call = transitions.plan(self._keys, verb, check_name(self._keys, name), value=value)
        return await self._ask(driver, call) in ("deleted", "paused")

    async def resume(self, driver: Driver, name: str) -> bool:
        """
        Resume a schedule; return whether it was paused.

        If another process changes the schedule, or its next tick passes, before Redis runs the script, try again.
        """
        check_name(self._keys, name)
        while row := await self._ask(driver, Command(("HGET", self._keys.plans, name), lambda reply: reply)):
            try:
                known = Row.parse(row)
            except ValueError:
                raise ConfigurationError(f"this version of reliq cannot read the schedule {name!r}") from None
            next = await self._next(driver, Schedule.parse(known.options.schedule))
            call = transitions.plan(self._keys, "resume", name, revision=known.revision, next=next)
            answer = await self._ask(driver, call)
            if answer != "superseded":
                return bool(answer == "resumed")
        return False

    async def read(self, driver: Driver, prefix: str, limit: int) -> list[StoredSchedule]:
        """Return up to `limit` schedules whose names begin with `prefix`, sorted by name."""
        check_int("limit", limit, least=1, most=10**9)
        found: dict[str, StoredSchedule] = {}  # HSCAN may return a row twice
        cursor, is_last = 0, self._keys.bare
        while not is_last and len(found) < limit:
            cursor, rows = await self._ask(driver, page(self._keys, cursor, prefix))
            is_last = cursor == 0
            if rows:
                ticks = await self._ask(driver, next_ticks(self._keys, list(rows)))
                found |= {name: stored(name, row, at) for (name, row), at in zip(rows.items(), ticks, strict=True)}
        return sorted(found.values(), key=lambda one: one.name)[:limit]

    async def _next(self, driver: Driver, schedule: Schedule) -> int | None:
        """Return the first tick of a schedule after the current time of Redis."""
        now_ms = (await self._ask(driver, transitions.plan_due(self._keys))).now_ms
        return schedule.next_after(now_ms // 1000)
