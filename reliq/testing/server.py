"""The Redis of the tests of a process: an embedded one, started once, or one that is given, which must be empty."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from reliq import distribution
from reliq.embedded import EmbeddedRedis
from reliq.errors import ConfigurationError
from reliq.testing import queries
from reliq.text import count_of

if TYPE_CHECKING:
    from reliq.client.client import Client

#: The name of the server that the kit starts itself.
EMBEDDED = "embedded"
_SCHEMES = ("redis://", "rediss://", "unix://")

#: URL -> the process that has found it empty.
_used: dict[str, int] = {}
_embedded: list[EmbeddedRedis] = []


def url_of(server: str) -> str:
    """
    Return the URL of a server for tests; `embedded` is started at first and stopped when the process ends.

    Raises:
        ConfigurationError: no redis-server is installed, or the URL is not that of a single server.
    """
    if server == EMBEDDED:
        return _started().url
    if not server.startswith(_SCHEMES):
        raise ConfigurationError(
            f"the Redis of tests is 'embedded' or the URL of a single server, redis://HOST:PORT/DATABASE, not {server!r}"
        )
    return server


def clear(client: Client, url: str) -> None:
    """Empty the database of tests; raise ConfigurationError for one that has keys which no test of this process wrote."""
    if _used.get(url) != os.getpid():
        if count := client.run(queries.keys_there()):
            raise ConfigurationError(
                f"{url} has {count_of(count, 'key')}, and tests empty their Redis: give them an empty database of their own, or "
                f"empty it: redis-cli -u {url} flushdb"
            )
        _used[url] = os.getpid()
    client.run(queries.empty())


def _started() -> EmbeddedRedis:
    if not _embedded:
        try:
            server = EmbeddedRedis()
        except ConfigurationError:
            raise ConfigurationError(distribution.missing("reliq.testing", "a redis-server", "testing")) from None
        _embedded.append(server.start())
        _used[server.url] = os.getpid()
        atexit.register(_stop, os.getpid())
    return _embedded[0]


def _stop(pid: int) -> None:
    if pid == os.getpid():  # a forked process has the parent's
        _embedded.pop().stop()
