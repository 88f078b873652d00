"""Every command of the runbook runs with the URL of Redis as its only setting."""

import re
import shlex
import sqlite3
from contextlib import closing

import pytest
from panels import RUNBOOK
from typer.testing import CliRunner

from reliq import Queue
from reliq.cli.app import app
from reliq.outbox.tables import ddl
from reliq.testing.server import EmbeddedRedis

BLOCKS = [line for block in re.findall(r"```sh\n(.*?)```", RUNBOOK, re.DOTALL) for line in block.splitlines()]
INLINE = re.findall(r"`(reliq [^`]+)`", RUNBOOK.replace("\n  ", " "))
#: Commands quoted without arguments, and commands that fail here: no worker listens, the queue is in use.
MAY_END_WITH = {"reliq health live --port 9464": 1, "reliq purge --state dead": 2, "reliq delete QUEUE": 2}
MAY_END_WITH |= {"reliq cron run QUEUE NAME": 1, "reliq delete QUEUE --cron NAME": 2}
#: Commands that ask for confirmation.
ASK = ("reliq purge QUEUE --state dead", "reliq redrive QUEUE", "reliq delete")
COMMANDS = sorted({*BLOCKS, *INLINE})


@pytest.fixture(scope="module")
def shop(server_path, tmp_path_factory):
    """A Redis with a queue for which `reliq doctor` reports no problem."""
    options = {"appendonly": "yes", "maxmemory": "1gb"}
    with EmbeddedRedis(server=server_path, options=options) as server:
        queue = Queue("shop", str, url=server.url)
        queue.publish("now")
        queue.publish("later", delay=600)
        outbox = tmp_path_factory.mktemp("outbox") / "shop.db"
        with closing(sqlite3.connect(outbox)) as database:
            for statement in ddl("sqlite"):
                database.execute(statement)
        yield {"RELIQ_URL": server.url, "RELIQ_DATABASE": f"sqlite:///{outbox}"}
        queue.close()


@pytest.mark.slow
def test_commands_of_the_runbook_run(shop):
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        words = shlex.split(command.replace("QUEUE", "shop").replace("…", "the reason"))[1:]
        agreed = ["--yes"] if command.startswith(ASK) else []
        done = CliRunner().invoke(app, [*words, *agreed], env=shop)

        assert done.exit_code in {0, MAY_END_WITH.get(command, 0)}, (command, done.output)
