"""Fixtures of the command tests: run commands in this process, with an emulated terminal."""

import sys
import time
from contextlib import ExitStack, closing
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from handling import bury_all
from terminal import Terminal
from transition import run_transition

from reliq import Layout, Queue
from reliq.admin import Admin
from reliq.cli.app import main
from reliq.lua.transitions import CallNumber
from reliq.redis import commands
from reliq.redis.commands import Worker
from reliq.redis.server import Connection


class Ran(NamedTuple):
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return msgspec.json.decode(self.out)


@pytest.fixture
def command(url, monkeypatch, capsys):
    """Run `reliq WORDS…` in this process, on the test's Redis or on the Redis of another URL."""
    monkeypatch.setenv("RELIQ_URL", url)

    def run(*words, url=None):
        if url:
            monkeypatch.setenv("RELIQ_URL", url)
        monkeypatch.setattr(sys, "argv", ["reliq", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def terminal(url):
    """Run a command, or another program, on a pseudo-terminal; it ends with the test."""
    with ExitStack() as stack:

        def start(*words, url=url, **options):
            return stack.enter_context(closing(Terminal(*words, url=url, **options)))

        yield start


@pytest.fixture(params=[Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True)], ids=str)
def layout(request):
    return request.param


@pytest.fixture
def admin(url):
    """An `Admin` of the test's Redis."""
    admin = Admin(url)
    yield admin
    admin.close()


@pytest.fixture
def queue(url):
    """A queue of dictionaries on the test's Redis."""
    queue = Queue("q", url=url)
    yield queue
    queue.close()


@pytest.fixture
def die(queue):
    """Publish messages and reject them, so that each becomes a dead letter."""

    def make(*ids, error="bad card", **options):
        for id in ids:
            queue.publish({"id": id}, id=id, **options)
            bury_all(queue, error)

    return make


@pytest.fixture
def claim():
    """Claim messages of a queue as a worker does; return them."""
    turns = count(1)

    def make(queue, limit=1, lease_ms=60_000, **options):
        call = CallNumber("w", next(turns))
        return run_transition(queue, "claim", call, limit=limit, lease_ms=lease_ms, **options).claimed

    return make


@pytest.fixture
def unhurried(monkeypatch):
    """Hold the clock of searches: only a search with `for_seconds=0` runs out of time."""
    monkeypatch.setattr("reliq.admin.messages.time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def alive(client):
    """Write the record of a worker, as its process would."""

    def make(id="w1", queues=("q",), running=(), **fields):
        now = time.time()
        about = {"host": "db1", "pid": 7, "version": "1.2.3", "slots": 4} | {"started": now - 60, "last_claim": now}
        worker = Worker(id=id, queues=queues, busy=len(running), running=running, **({"seen": now} | about | fields))
        for call in commands.write_worker(worker):
            client.execute_command(*call.command)

    return make


@pytest.fixture
def login(client, url):
    """Make a user with exactly the rights of a role on queues; return its URL."""
    made = []

    def make(role, *queues, layout=Layout.RELIQ, **options):
        rule = Admin(url, layout=layout).acl([role], queues, user=f"the-{role}", **options)
        client.execute_command("ACL", "SETUSER", rule.user, "reset", *rule.rules, "on", ">secret")
        client.acl_log_reset()
        made.append((rule.user, url.replace("redis://", f"redis://{rule.user}:secret@")))
        return made[-1][1]

    yield make
    for user, known_by in made:
        client.acl_deluser(user)
        Connection.to(known_by).maps.clear()  # the next test has another queue with this name


@pytest.fixture
def refused(client):
    """Return the commands that Redis has refused since `login`, without the optional commands of a new connection."""
    return lambda: sorted(
        {one["object"] for one in client.acl_log() if not one["object"].startswith(("client", "info"))}
    )
