"""The names of queues that a shell completes: asked of Redis in a moment, and none when it does not answer."""

import warnings
from contextlib import suppress

from reliq import commands
from reliq.client.client import Client
from reliq.keys import Keys
from reliq.transport.connection import Connection
from reliq.transport.target import Target

#: A shell waits no longer than this for a reply, and takes no more names.
COMPLETION_SECONDS, MOST = 0.5, 1000


def names(redis: Target | None) -> list[str]:
    """Return the names in the registry of a Redis, sorted; none when it is away, refuses or takes too long."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")  # a line of ours would stand in the middle of the person's own
        client = Client.to(Connection.to(redis), COMPLETION_SECONDS)
        _, entries = client.run(commands.registry_page(0, MOST))
        return sorted(keys.name for entry in entries if (keys := Keys.registered(entry)) is not None)
    return []
