"""Periodic entries: put in force with their schedules, and ticked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from reliq import events
from reliq.call import Arg, Call
from reliq.foreign import LAST_SECOND, whole_number
from reliq.keys import Keys
from reliq.lua import script
from reliq.transitions.protocol import bounded, clock_arg, span
from reliq.wireformat import ENVELOPE_START

TickStatus = Literal["published", "paused", "overlap", "missed", "done", "superseded", "unknown"]


@dataclass(frozen=True, slots=True)
class InForce:
    """
    A periodic entry whose schedule is in force.

    Attributes:
        last: the tick up to which all is done, in unix seconds.
        asked: when somebody asked for a run at once, in unix ms; None when nobody did.
    """

    last: int
    asked: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """
    A tick of a periodic entry, or a run that somebody asked for.

    Attributes:
        entry, schedule: its name, and its schedule as text.
        at: the tick, in unix seconds.
        since: the tick up to which all was done before it.
        missed: how many ticks between the two are counted as missed.
        message: id and value, as `publish` takes them; None for a tick that is missed itself and among `missed`.
        due_ms: when the message is due; what is past is due now.
        asked: which run was asked for, in unix ms; None for a tick.
        overlap: whether a tick is published while the entry's last message is alive.
    """

    entry: str
    schedule: str
    at: int
    since: int
    missed: int = 0
    message: tuple[str, bytes] | None = None
    due_ms: int = 0
    asked: int | None = None
    overlap: Literal["allow", "skip"] = "allow"


def register(
    keys: Keys, entries: Sequence[tuple[str, str]], *, newest: bool = False, clock: int | None = None
) -> Call[tuple[int, list[InForce | None]]]:
    """
    Put periodic entries in force, each by its name and schedule; return Redis' clock in ms, and how far each is.

    Args:
        newest: whether they take the place of other schedules, as those of a process that starts do; else only that of
            one which no process has registered for half a minute. The schedule of an entry that is None is another.
    """
    bounded("entries", entries)
    return Call(
        script("register"),
        (keys.cron,),
        (clock_arg(clock), "1" if newest else "", *(part for entry in entries for part in entry)),
        lambda reply: (int(reply[0]), [_in_force(*reply[at : at + 2]) for at in range(1, 1 + 2 * len(entries), 2)]),
    )


def tick(keys: Keys, one: Tick, *, ttl_ms: int, retries: int, clock: int | None = None) -> Call[TickStatus]:
    """
    Publish the message of a tick and go on to the next, unless that was done.

    Returns:
        `published`; `paused`, also for the missed ones before it, or `overlap` for one that is skipped; `missed` for one without a message; `done` when
        another process was first; `superseded` when another schedule is in force, `unknown` when none is.
    """
    asked: Arg = "" if one.asked is None else one.asked
    args: list[Arg] = [clock_arg(clock), one.entry, one.schedule, one.since, one.at, asked, one.overlap, one.missed]
    args += [one.due_ms, span("ttl_ms", ttl_ms), retries, "" if keys.bare else ENVELOPE_START, *(one.message or ())]
    of_script = script("tick")
    tail = [keys.msg(one.message[0])] if one.message else []

    def happened(answer: TickStatus) -> Iterable[events.Event]:
        if answer == "published" and one.message:
            yield events.Published(keys.name, (one.message[0],))
        if answer in get_args(events.TickOutcome):
            missed = 0 if answer == "paused" else one.missed
            yield events.Ticked(keys.name, one.entry, one.at, cast("events.TickOutcome", answer), missed)

    return Call(of_script, (*of_script.lead(keys), *tail), args, _status, happened)


def _in_force(last: bytes, asked: bytes) -> InForce | None:
    """Return how far an entry is; a wish that is no moment is none of ours."""
    wish = whole_number(asked)
    return InForce(int(last), wish if wish and 0 < wish < LAST_SECOND * 1000 else None) if last else None


def _status(reply: bytes) -> TickStatus:
    word = reply.decode()
    if word not in get_args(TickStatus):
        raise ValueError
    return cast("TickStatus", word)
