"""Whether a queue is there at all, so that a name mistyped at night is an error and not an empty queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.call import Command
from reliq.errors import ConfigurationError
from reliq.keys import QUEUES_KEY, Keys, Layout, is_name

if TYPE_CHECKING:
    from reliq.client.client import Client


#: Where else a queue is looked for that is not where it was said to be.
LAYOUTS = (Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True))


def check_known(client: Client, keys: Keys, for_seconds: float) -> None:
    """
    Raise ConfigurationError when nothing in Redis says that there is such a queue, naming the layout that has it.

    The registry says so, or a structure, a total, a dead letter or an end.
    """
    places = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.counts)
    rest = (keys.dead, keys.totals, keys.ends, keys.paused)
    if client.run(Command(("EXISTS", *places, *rest), int), for_seconds=for_seconds):
        return
    if client.run(Command(("HEXISTS", QUEUES_KEY, keys.entry), int)):
        return
    elsewhere = " and ".join(f"--layout {layout}" for layout in _layouts_with(client, keys))
    raise ConfigurationError(
        f"there is no queue {keys.name!r} here{f' in the layout {keys.layout}' if keys.bare else ''}; "
        + (f"there is one with {elsewhere}" if elsewhere else "`reliq queues --scan` lists what there is")
    )


def _layouts_with(client: Client, sought: Keys) -> list[Layout]:
    """Return the layouts in which a queue of that name has messages or totals; what Redis refuses to tell is passed over."""
    others = [layout for layout in LAYOUTS if layout != sought.layout and is_name(sought.name, layout)]
    asked = [Keys(sought.name, layout) for layout in others]
    answers = client.run_all([Command(("EXISTS", key), int) for keys in asked for key in (keys.counts, keys.totals)])
    return [layout for at, layout in enumerate(others) if 1 in answers[2 * at : 2 * at + 2]]
