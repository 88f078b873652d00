"""The block that isolates a test: a Redis of its own, which everything in the process means."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliq.client.client import Client
from reliq.errors import ConfigurationError
from reliq.testing.kit import KIT_REPLY_SECONDS, Reliq
from reliq.testing.server import EMBEDDED, clear, url_of
from reliq.testing.travel import TestClock
from reliq.transport.connection import Connection, redirected

if TYPE_CHECKING:
    from collections.abc import Iterator

_open: list[Reliq] = []


@contextmanager
def isolated(server: str = EMBEDDED) -> Iterator[Reliq]:
    """
    Give a test a Redis that is empty, which every URL, client and RELIQ_URL means meanwhile, in this process and its forks.

    Args:
        server: `embedded`, a redis-server that this process starts once and stops at its end; or the URL of a single
            server's empty database.

    Raises:
        ConfigurationError: no redis-server is installed, the database holds keys, another block has not ended, or a
            worker that was started in this one still runs at its end.

    Example:
        class Orders(unittest.TestCase):
            def setUp(self):
                self.reliq = self.enterContext(isolated())
    """
    if _open:
        raise ConfigurationError(
            "one test has been isolated already, and its block has not ended: they cannot be nested"
        )
    url = url_of(server)
    upkeep = Client.to(Connection(url), KIT_REPLY_SECONDS)
    clear(upkeep, url)
    clock, before = TestClock(upkeep), _workers()
    reliq = Reliq(url, clock)
    _open.append(reliq)
    try:
        with redirected(reliq.connection):
            yield reliq
        if _workers() - before:
            raise ConfigurationError(
                "a worker that the test has started still runs, and would take the messages of the next test: end the "
                "test with consumer.stop()"
            )
    finally:
        _open.remove(reliq)
        clock.end()
        clear(upkeep, url)
        reliq.connection.close()


def _workers() -> set[threading.Thread]:
    """Return the threads that claim messages, one for each worker in this process."""
    return {thread for thread in threading.enumerate() if thread.name == "reliq-fetcher"}
