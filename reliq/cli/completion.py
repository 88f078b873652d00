"""The queue names that a shell completes. Redis is asked with a short timeout; without a reply there are none."""

import re
import warnings
from contextlib import suppress

from reliq.keys import Keys
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.redis.url import Target

#: A shell waits no longer than this for a reply, and takes no more names.
COMPLETION_SECONDS, MOST = 0.5, 1000
#: Any producer can register a name such as `x;reboot` in Go's layout, and shells evaluate completions. A name that begins
#: with a hyphen would be an option.
_COMPLETABLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")


def names(redis: Target | None) -> list[str]:
    """Return the names in the registry that mean nothing else to a shell; none when Redis does not reply in time."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")  # a line of ours would stand in the middle of the person's own
        client = Client.to(Connection.to(redis), COMPLETION_SECONDS)
        _, entries = client.run(commands.registry_page(0, MOST))
        known = [keys.name for entry in entries if (keys := Keys.registered(entry)) is not None]
        return sorted(filter(_COMPLETABLE.fullmatch, known))
    return []
