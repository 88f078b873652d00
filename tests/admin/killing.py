"""
Operators that are killed at every point: when a request is made and its reply has not come back.

A kill before the next request leaves the same in Redis.
"""

import contextlib
import socket
import threading

from forked import CONTEXT

from reliq import Admin, Queue
from reliq.admin import LetterFilter, RedriveOptions


def move(admin, state):
    admin.move("from", "to", state)


def redrive(admin, to):
    admin.redrive("from", LetterFilter(), RedriveOptions(), to=to)


def publish_lines(admin, path):
    admin.publish_lines("to", path, raw=True)


class Guillotine:
    """A TCP proxy in front of Redis that kills its client at the n-th reply."""

    def __init__(self, port, number):
        self.victim = None
        self._port, self._left = port, number
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            for side, source, target in (("request", client, server), ("reply", server, client)):
                thread = threading.Thread(target=self._pass_on, args=(side, source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, side, source, target):
        with source:
            while data := _read(source):
                if side == "reply":
                    self._left -= 1
                    if self._left == 0:
                        self.victim.kill()
                        break
                try:
                    target.sendall(data)
                except OSError:
                    break
            _hang_up(target)


def _read(peer):
    try:
        return peer.recv(65_536)
    except OSError:
        return b""


def _hang_up(peer):
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def operate(url, act, arguments):
    """Be the operator that is killed."""
    act(Admin(url), *arguments)


def killed_at(port, number, act, *arguments):
    """Run `act` in a process of its own and kill it at a point; return whether the point came before the end."""
    guillotine = Guillotine(port, number)
    victim = guillotine.victim = CONTEXT.Process(target=operate, args=(guillotine.url, act, arguments))
    victim.start()
    victim.join(100)
    code = victim.exitcode
    victim.close()
    guillotine.close()
    assert code in (0, -9), f"the operator ended with {code}"
    return code == -9


def handle_all(url, *names, handled):
    """Work until nothing can be claimed; note each body in `handled`."""
    for name in names:
        queue = Queue(name, str, url=url)
        while True:
            with queue.receive(limit=500) as jobs:
                handled.update(job.body for job in jobs)
            if not jobs:
                break
        queue.close()


def every_point(port, act, *arguments, stage, check):
    """Stage, kill at a point, check: for every point there is; return how many there were."""
    number = 0
    while True:
        stage()
        came = killed_at(port, number + 1, act, *arguments)
        check(f"reply {number + 1}")
        if not came:
            return number
        number += 1
