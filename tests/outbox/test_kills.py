"""Every committed order has one effect, and none without a commit, whichever process is killed at whichever moment."""

import os
import random
from contextlib import closing

import pytest
from kills import Run

#: Process kills in CI; `--long` and the program of tests/outbox/kills.py make more.
KILLS, LONG_KILLS = 6, 200


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_every_committed_order_has_one_effect_whichever_process_is_killed(kind, request, url, tmp_path, pytestconfig):
    if kind == "postgresql":
        server = request.getfixturevalue("postgres")
        import psycopg

        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
    place = server.url if kind == "postgresql" else f"sqlite:///{tmp_path}/shop.db"
    seed = int(os.environ.get("RELIQ_SEED", "1"))

    with closing(Run(place, url)) as run:
        run.kills(LONG_KILLS if pytestconfig.getoption("--long") else KILLS, random.Random(seed))
        found = run.drain()

    assert found.pop("orders") > KILLS
    assert found == {"drained": True, "missing": 0, "twice": 0, "phantom": 0}
