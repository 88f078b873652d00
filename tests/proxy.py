"""A TCP proxy in front of Redis that simulates network faults: it loses replies and drops connections."""

import socket
import struct
import threading
from contextlib import suppress

from listener import Listener, received


class Proxy(Listener):
    """A TCP proxy in front of Redis that drops replies to commands that contain a word, or whole connections."""

    def __init__(self, port, listen=0):
        self.port = port
        self._word, self._times = b"", 0
        self._forgotten, self._resets = 0, False
        self._held, self._awaited, self._may_answer = None, b"", threading.Event()
        self._may_answer.set()
        self.swallowed = self.late = 0
        super().__init__(listen, backlog=512)

    def lose_reply_to(self, word, times=1):
        """Close the connection instead of forwarding the reply to the next commands that contain `word`."""
        self._word, self._times = word.encode(), times

    def forget_connections(self, *, resets):
        """Forget connections as a firewall does: later packets on these connections are dropped, or answered by RST."""
        self._forgotten, self._resets = self.connections, resets

    def hold_reply_to(self, word, until):
        """Hold replies to commands with `word` until another command is sent; `late` counts replies held to the end."""
        self._held, self._awaited = word.encode(), until.encode()

    def _serve(self, client, number):
        try:
            server = socket.create_connection(("127.0.0.1", self.port))
        except OSError:  # the server has ended
            client.close()
            return
        with client, server:
            lose = threading.Event()
            back = threading.Thread(target=self._back, args=(server, client, lose), daemon=True)
            back.start()
            while data := received(client):
                if number <= self._forgotten:
                    if self._resets:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        client.close()
                        break
                    continue
                if self._times and self._word in data:
                    self._times -= 1
                    lose.set()
                if self._held and self._held in data:
                    self._may_answer.clear()
                if self._awaited in data:
                    self._may_answer.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR if number <= self._forgotten else socket.SHUT_WR)
            back.join()

    def _back(self, server, client, lose):
        with suppress(OSError):  # the client has gone
            while data := received(server):
                self.late += not self._may_answer.wait(20)
                if lose.is_set():
                    self.swallowed += 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
