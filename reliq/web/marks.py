"""The marks of a queue: why it wants a person's look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from reliq.crons import TICK_LATE_SECONDS
from reliq.readable import spoken
from reliq.text import partial

if TYPE_CHECKING:
    from reliq.admin import CronView, QueueView

#: A message that has waited for this many seconds is late, and is much too late, as the alerts have it.
LATE_SECONDS, TOO_LATE_SECONDS = 60.0, 300.0
#: The share of deliveries that fail from which a queue is marked, and is marked as wrong.
SOME_FAIL, MOST_FAIL = 0.1, 0.5


class QueueMark(NamedTuple):
    """A few words beside a queue; `bad` is red, `warn` asks for a look, and "" only tells."""

    level: Literal["bad", "warn", ""]
    text: str


def is_unwatched(view: QueueView) -> bool:
    """Return whether messages wait in a queue that nobody works on: no worker is there, and nothing is acked."""
    return view.workers == 0 and view.alive > 0 and not (view.rates and view.rates.acked)


def marks(view: QueueView) -> list[QueueMark]:
    """Return why a queue wants a look, the gravest first; nothing for a queue that is well."""
    found = [QueueMark("bad", "nobody works on it")] if is_unwatched(view) else []
    if view.away:
        found.append(QueueMark("bad", partial(view.away)))
    if view.pause is not None:
        found.append(QueueMark("warn", "paused" + (f": {view.pause.reason}" if view.pause.reason else "")))
    elif (view.late or 0.0) >= LATE_SECONDS:
        found.append(
            QueueMark("bad" if (view.late or 0.0) >= TOO_LATE_SECONDS else "warn", f"{spoken(view.late or 0)} late")
        )
    failing = failed_share(view)
    if failing >= SOME_FAIL:
        found.append(QueueMark("bad" if failing >= MOST_FAIL else "warn", f"{failing:.0%} of deliveries fail"))
    if view.workers is None:
        found.append(QueueMark("warn", "workers unknown"))
    elif view.workers and (view.busy or 0) >= (view.slots or 0) > 0:
        found.append(QueueMark("warn", "all slots busy"))
    return found


def failed_share(view: QueueView) -> float:
    """Return which part of the deliveries failed; 0 while nothing was counted."""
    if view.rates is None or view.rates.failed <= 0:
        return 0.0
    return view.rates.failed / (view.rates.failed + view.rates.acked)


def cron_marks(view: CronView) -> list[QueueMark]:
    """Return why a periodic entry wants a look; nothing for one that ticks."""
    found = []
    if not view.is_served:
        found.append(QueueMark("bad", "no worker has it"))
    elif view.late > TICK_LATE_SECONDS:
        found.append(QueueMark("bad", f"its tick is {spoken(view.late)} late"))
    if view.next is None:
        found.append(QueueMark("warn", "its schedule cannot be read here"))
    if view.pause is not None:
        found.append(QueueMark("warn", "paused" + (f": {view.pause.reason}" if view.pause.reason else "")))
    return found
