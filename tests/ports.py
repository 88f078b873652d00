"""Find free ports, and reserve them so that no other test process gets them."""

import socket
from contextlib import ExitStack
from itertools import count

#: These ports are below the ports of outgoing connections. Otherwise, a client that reconnects while its server is down could
#: take the port of the server, or connect to itself.
FIRST, LAST = 10_000, 20_000
#: The bus port of a Cluster node is this much higher than its port.
BUS = 10_000

_steps = count()


def free_port() -> int:
    """Return a free loopback port whose bus port is free too; no other test process gets it."""
    while True:
        port = FIRST + next(_steps) % (LAST - FIRST)
        with ExitStack() as stack:
            # A UDP socket at the same port reserves it until this process ends.
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
