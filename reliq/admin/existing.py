"""Whether a queue is there at all, so that a name mistyped at night is an error and not an empty queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.call import Command
from reliq.errors import ConfigurationError
from reliq.keys import QUEUES_KEY, Layout

if TYPE_CHECKING:
    from reliq.doors.blocking import BlockingDoor
    from reliq.keys import Keys


def check_known(door: BlockingDoor, keys: Keys, for_seconds: float) -> None:
    """
    Raise ConfigurationError when nothing in Redis says that there is such a queue.

    The registry says so, or a structure, a total, a dead letter or an end.
    """
    places = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.counts)
    rest = (keys.dead, keys.totals, keys.ends, keys.paused)
    if door.run(Command(("EXISTS", *places, *rest), int), for_seconds=for_seconds):
        return
    if keys.layout == Layout.RELIQ and door.run(Command(("HEXISTS", QUEUES_KEY, keys.name), int)):
        return
    raise ConfigurationError(
        f"there is no queue {keys.name!r} here; `reliq queues --scan` lists what there is"
        + (" (--hdt3213 looks in the layout of the Go original)" if keys.layout == Layout.RELIQ else "")
    )
