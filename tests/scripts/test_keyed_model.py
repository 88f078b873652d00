"""A queue with keys after any calls in any order: each message is in one place, limits hold, nothing remains."""

import pytest
import redis
from held_clock import NOON
from held_server import held_clock, skip_unless_held
from keyed_machine import KeyedMachine
from test_model import check_model

from reliq.testing.server import EmbeddedRedis

pytestmark = pytest.mark.slow

#: Number of examples, and steps in each.
QUICK, LONG = (80, 40), (4000, 40)


@pytest.mark.timeout(3600)
def test_a_queue_with_keys_keeps_its_promises(request, server_path, tmp_path):
    examples, steps = LONG if request.config.getoption("--long") else QUICK
    skip_unless_held(server_path)
    held = held_clock(tmp_path, NOON)
    server = EmbeddedRedis(server=held.server(server_path) if held else server_path)
    with server, redis.Redis(unix_socket_path=str(server.socket)) as client:
        check_model(KeyedMachine, client, held, examples=examples, steps=steps)
