"""The pytest plugin: the fixture `reliq`. Nothing else of reliq is imported before a test asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.testing import Reliq


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of pytest's ini file."""
    parser.addini("reliq_server", "the Redis of tests: 'embedded', or the URL of an empty database", default="embedded")


@pytest.fixture(scope="session")
def reliq_server(pytestconfig: pytest.Config) -> str:
    """Return what `isolated` takes, as the ini file names it."""
    worker = getattr(pytestconfig, "workerinput", {}).get("workerid", "")
    return server_of(str(pytestconfig.getini("reliq_server")), worker)


def server_of(server: str, worker: str) -> str:
    """
    Return the server of one process: each of pytest-xdist has an embedded one, or a database, of its own.

    Raises:
        pytest.UsageError: there are several processes, and the URL has no number of a database to count on from.
    """
    if server == "embedded" or not worker:
        return server
    start, _, database = server.rpartition("/")
    if not database.isdecimal():
        raise pytest.UsageError(f"with pytest-xdist, reliq_server must end in the number of a database, not {server!r}")
    return f"{start}/{int(database) + int(worker.removeprefix('gw'))}"


@pytest.fixture
def reliq(reliq_server: str) -> Iterator[Reliq]:
    """Give the test a Redis of its own, which every queue means, whatever it names."""
    testing = importlib.import_module("reliq.testing")
    errors = importlib.import_module("reliq.errors")
    try:
        with testing.isolated(reliq_server) as kit:
            yield kit
    except errors.ConfigurationError as error:
        pytest.fail(str(error), pytrace=False)
    except errors.LoginError as error:
        pytest.fail(
            f"{error}. Each process of pytest-xdist takes the next database from reliq_server on: start fewer (-n), or let "
            "the server have more (databases in redis.conf)",
            pytrace=False,
        )
