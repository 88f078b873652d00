"""A server on a loopback port with a thread for each connection; a with statement starts and stops it."""

import socket
import threading
from contextlib import suppress


class Listener:
    """
    Accepts connections until it is closed; `_serve` of a subclass serves one connection, with its number.

    Attributes:
        connections: number of connections so far.
    """

    def __init__(self, port=0, backlog=None):
        self._listener = socket.create_server(("127.0.0.1", port), backlog=backlog)
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        with suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept in its thread, which else keeps the port open
        self._listener.close()

    def _accept(self):
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._run, args=(peer, self.connections), daemon=True).start()

    def _run(self, peer, number):
        with suppress(OSError):  # either end may be closed at any moment; an error of a thread would fail some test
            self._serve(peer, number)


def received(peer):
    """Return the data received on a connection, nothing at its end."""
    try:
        return peer.recv(65_536)
    except OSError:
        return b""


class Repeated:
    """Runs `_work` of a subclass in a thread during a with block, again and again until `_over` is set."""

    def __init__(self):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
