"""Run a model against the package in this folder, without shrinking failing examples."""

import sys
import tempfile
from pathlib import Path

import redis
from hypothesis import Phase

from reliq.testing.server import EmbeddedRedis, find_server

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "scripts"), str(TESTS)]


def main(which: str, examples: str) -> None:
    from held_clock import NOON
    from held_server import held_clock
    from keyed_machine import KeyedMachine
    from test_model import QueueMachine, check_model

    from tests.harness.mutants.mutant import MODEL

    with tempfile.TemporaryDirectory() as folder:
        held = held_clock(Path(folder), NOON)
        server = EmbeddedRedis(server=held.server(find_server()) if held else None)
        with server, redis.Redis(unix_socket_path=str(server.socket)) as client:
            options = {"examples": int(examples), "derandomize": True, "phases": [Phase.generate]}
            machine = QueueMachine if which == MODEL else KeyedMachine
            check_model(machine, client, held, steps=50, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
