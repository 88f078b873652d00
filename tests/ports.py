"""Ports that stay free until whoever asked for them has bound them."""

import socket
from contextlib import ExitStack
from itertools import count

#: Below what systems give to connections that go out: a client that tries again and again while its server is away
#: takes none of them, and never meets itself there.
FIRST, LAST = 10_000, 20_000
#: Nodes of a cluster also talk at a port that is so much higher.
BUS = 10_000

_steps = count()


def free_port() -> int:
    """Return a loopback port that nothing listens on, nor at the one of its bus; no other process of tests gets it."""
    while True:
        port = FIRST + next(_steps) % (LAST - FIRST)
        with ExitStack() as stack:
            # What keeps it for us is a socket of another kind at the same port, as long as this process lives.
            mark = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            probes = [stack.enter_context(socket.socket()) for _ in range(2)]
            try:
                mark.bind(("127.0.0.1", port))
                for probe, at in zip(probes, (port, port + BUS), strict=True):
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", at))
            except OSError:
                continue
            mark.detach()
            for probe in probes:
                probe.close()
            stack.pop_all()
            return port
