"""What the tests of the commands share: a person's terminal, without the terminal."""

import sys
from dataclasses import dataclass

import msgspec
import pytest

from reliq import Queue
from reliq.cli.app import main


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return msgspec.json.decode(self.out)


@pytest.fixture
def command(url, monkeypatch, capsys):
    """Run `reliq WORDS…` in this process, on the test's Redis."""
    monkeypatch.setenv("RELIQ_URL", url)

    def run(*words):
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
def queue(url):
    """A queue of dictionaries on the test's Redis."""
    queue = Queue("q", url=url)
    yield queue
    queue.close()


@pytest.fixture
def die(queue):
    """Publish messages and reject them; each becomes a dead letter."""

    def make(*ids, error="bad card", **options):
        for id in ids:
            queue.publish({"id": id}, id=id, **options)
            with queue.receive() as [job]:
                job.reject(reason=error)
            queue.moves.collect([id], letters_max=1000, letters_ms=10**9)

    return make
