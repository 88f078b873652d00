"""Fixtures of the outbox and inbox tests."""

from contextlib import closing
from functools import partial

import pytest
from databases import Postgresql, Sqlite
from required import must_run_in_ci

from reliq import Queue, Relay
from reliq.outbox.relay import OutboxMover
from tests.postgres import Postgres, programs


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server."""
    if programs() is None:
        must_run_in_ci("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with Postgres(max_prepared_transactions="2") as server:
        yield server


@pytest.fixture
def postgresql(postgres):
    return Postgresql(postgres)


@pytest.fixture
def sqlite(tmp_path):
    return Sqlite(tmp_path / "shop.db")


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request):
    """Each kind of database."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def tx(database):
    """A connection of the application, by psycopg or sqlite3."""
    with closing(database.connect()) as connection:
        yield connection


@pytest.fixture
def orders(url):
    return Queue("orders", dict, url=url)


@pytest.fixture
def mover_at(url):
    """Make relays, each with the URL of its database."""
    made = []

    def make(place, observers=(), redis=url, **options):
        made.append(OutboxMover(Relay(place, **options), redis, observers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def mover(database, mover_at):
    """Make relays of the database under test."""
    return partial(mover_at, database.url)
