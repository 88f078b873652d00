"""The names of queues that a shell completes: asked of Redis in a moment, and none when it does not answer."""

import threading
import warnings
from contextlib import suppress

from reliq import commands
from reliq.client.client import Client
from reliq.keys import Keys
from reliq.transport.connection import Connection

#: A shell waits no longer than this for names, and takes no more of them.
COMPLETION_SECONDS, MOST = 0.5, 1000


def names(url: str | None) -> list[str]:
    """Return the names in the registry of the Redis at `url`, sorted; none when it is away, refuses or takes too long."""
    found: list[str] = []
    asking = threading.Thread(target=_ask, args=(url, found), daemon=True)
    asking.start()
    asking.join(COMPLETION_SECONDS)
    return sorted(found)


def _ask(url: str | None, found: list[str]) -> None:
    warnings.simplefilter("ignore")  # a line of ours would stand in the middle of the person's own
    with suppress(Exception):
        client = Client.to(Connection.to(url), COMPLETION_SECONDS)
        _, entries = client.run(commands.registry_page(0, MOST))
        found += [keys.name for entry in entries if (keys := Keys.registered(entry)) is not None]
