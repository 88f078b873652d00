"""
The pytest plugin with the fixture `reliq`.

The test kit is imported only when a test uses the fixture, so that other test suites start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.testing import Reliq


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option `reliq_server`."""
    parser.addini("reliq_server", "the Redis of tests: 'embedded', or the URL of an empty database", default="embedded")


@pytest.fixture(scope="session")
def reliq_server(pytestconfig: pytest.Config) -> str:
    """Return the argument of `isolated` for this process: the ini option `reliq_server`, adapted to pytest-xdist."""
    worker = getattr(pytestconfig, "workerinput", {}).get("workerid", "")
    return server_of(str(pytestconfig.getini("reliq_server")), worker)


def server_of(server: str, worker: str) -> str:
    """
    Return which Redis server or database a pytest process uses, as the argument of `isolated`.

    With pytest-xdist, each process gets its own server or database.

    Args:
        server: the ini option: `embedded`, or a URL that ends in a database number.
        worker: the name that pytest-xdist gave this process, such as `gw1`; empty without pytest-xdist.

    Raises:
        pytest.UsageError: pytest-xdist is used, and the URL has no database number.
    """
    if server == "embedded" or not worker:
        return server
    start, _, database = server.rpartition("/")
    if not database.isdecimal():
        raise pytest.UsageError(f"with pytest-xdist, reliq_server must end in the number of a database, not {server!r}")
    return f"{start}/{int(database) + int(worker.removeprefix('gw'))}"


@pytest.fixture
def reliq(reliq_server: str) -> Iterator[Reliq]:
    """Give the test its own empty Redis, which all queues of the test use instead of their URLs."""
    testing = importlib.import_module("reliq.testing")
    errors = importlib.import_module("reliq.errors")
    try:
        with testing.isolated(reliq_server) as kit:
            yield kit
    except errors.ConfigurationError as error:
        pytest.fail(str(error), pytrace=False)
    except errors.LoginError as error:
        pytest.fail(
            f"{error}. Each process of pytest-xdist takes the next database after reliq_server: start fewer (-n), or let "
            "the server have more (databases in redis.conf)",
            pytrace=False,
        )
