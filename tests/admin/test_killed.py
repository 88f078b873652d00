"""A killed move, redrive or bulk publish loses no message at any point; repeated at once, it duplicates none."""

import contextlib
import socket
import threading
import time

import pytest
from forked import CONTEXT
from handling import bury_all, handle_all
from listener import Listener, received
from transition import run_transition

from reliq import Admin, Queue
from reliq.admin.bulk import HOLD_MS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BODIES = ["a", "b", "c"]


def move(admin, state):
    admin.move("from", "to", state)


def redrive(admin, to):
    admin.redrive("from", to=to)


def publish_lines(admin, path):
    admin.publish_lines("to", path, raw=True)


class Guillotine(Listener):
    """A TCP proxy in front of Redis that kills its client at the n-th reply."""

    def __init__(self, port, number):
        self.victim = None
        self._port, self._left = port, number
        super().__init__()

    def _serve(self, client, _number):
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            back = threading.Thread(target=self._back, args=(server, client), daemon=True)
            back.start()
            while data := received(client):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()

    def _back(self, server, client):
        while data := received(server):
            self._left -= 1
            if self._left == 0:
                self.victim.kill()
                return
            with contextlib.suppress(OSError):
                client.sendall(data)


def operate(url, act, arguments):
    """Run the operation that will be killed."""
    act(Admin(url), *arguments)


def killed_at(port, number, act, *arguments):
    """Run `act` in a child process and kill it before reply `number`; return False if the process ended before."""
    guillotine = Guillotine(port, number)
    victim = guillotine.victim = CONTEXT.Process(target=operate, args=(guillotine.url, act, arguments))
    victim.start()
    victim.join(100)
    code = victim.exitcode
    victim.close()
    guillotine.close()
    assert code in (0, -9), f"the operator ended with {code}"
    return code == -9


def every_point(port, act, *arguments, stage, check, least):
    """For each reply: stage, kill the process there, and check. Expect at least `least` replies."""
    number, came = 0, True
    while came:
        number += 1
        stage()
        came = killed_at(port, number, act, *arguments)
        check(f"reply {number}")
    assert number > least


class Account:
    """Two queues on an empty server; expects each body to be handled once, after any moves between them."""

    def __init__(self, client, url, act, *arguments, drained, bodies=BODIES):
        self.bodies = bodies
        self.client, self.url, self.act, self.arguments, self.drained = client, url, act, arguments, drained
        self.queues = [Queue(name, str, url=url) for name in ("from", "to")]

    def clear(self):
        self.client.flushall()
        self.queues[1].publish("known", id="known")
        with self.queues[1].receive():
            pass

    def handled(self):
        return [body for queue in self.queues for body in handle_all(queue)]

    def check(self, point):
        handled = self.handled() if self.drained else []
        self.act(Admin(self.url), *self.arguments)
        assert sorted(handled + self.handled()) == sorted(self.bodies), f"killed at {point}"
        for queue in self.queues:
            counts = queue.counts()
            assert (counts.alive, counts.missing, counts.dead) == (0, 0, 0), f"{queue} after a kill at {point}"


@pytest.mark.parametrize("state", ["ready", "retry"])
def test_move_killed_at_any_point_is_finished_by_a_repetition(state, client, url, redis_server):
    account = Account(client, url, move, state, drained=False)
    source, target = account.queues

    def stage():
        account.clear()
        source.publish_many(BODIES)
        if state == "retry":
            with source.receive(limit=3) as jobs:
                for job in jobs:
                    job.nack(delay=0)
            while source.counts().retry < len(BODIES):
                run_transition(source, "reclaim")

    def check(point):
        move(Admin(url), state)
        for id in client.zrange(target.keys.pending, 0, -1):  # a postponed message keeps its new due time
            target.reschedule(id.decode())
        run_transition(target, "promote")
        account.check(point)

    every_point(redis_server.port, move, state, stage=stage, check=check, least=9)


def test_move_killed_at_any_point_and_not_repeated_in_time_loses_nothing(client, url, redis_server):
    account = Account(client, url, move, "ready", drained=True)
    source = account.queues[0]

    def stage():
        account.clear()
        source.publish_many(BODIES)

    def check(point):
        handled = account.handled()
        move(Admin(url), "ready")
        later = 2 * HOLD_MS * 1000 + int(time.time() * 1e6)
        with source.receive(limit=10, wait=0.2) as jobs:  # the claim gives a message in a list its due time
            handled += [job.body for job in jobs]
        for queue in account.queues:
            run_transition(queue, "promote", clock=later)
        handled += account.handled()
        assert set(handled) == set(BODIES), f"killed at {point}"
        assert max(handled.count(body) for body in BODIES) <= 2
        assert [queue.counts().missing for queue in account.queues] == [0, 0]

    every_point(redis_server.port, move, "ready", stage=stage, check=check, least=9)


def test_move_of_pending_messages_killed_at_any_point_keeps_their_due_times(client, url, redis_server):
    source, target = Queue("from", str, url=url), Queue("to", str, url=url)
    due = {}

    def stage():
        client.flushall()
        target.publish("known", id="known")
        for body in BODIES:
            due[body] = source.publish(body, id=body, delay=600).due

    def check(point):
        move(Admin(url), "pending")
        there = {id.decode(): score for id, score in client.zrange(target.keys.pending, 0, -1, withscores=True)}
        assert there == pytest.approx(due, abs=0.0021), f"killed at {point}"
        assert (source.counts().alive, source.counts().missing, target.counts().missing) == (0, 0, 0)
        left = client.pttl(target.keys.msg("a")) / 1000
        assert 7 * 86_400 <= left <= 7 * 86_400 + 601

    every_point(redis_server.port, move, "pending", stage=stage, check=check, least=9)


@pytest.mark.parametrize(("to", "drained"), [("to", False), (None, True)], ids=["another queue", "the same queue"])
def test_redrive_killed_at_any_point_is_finished_by_a_repetition(to, drained, client, url, redis_server):
    account = Account(client, url, redrive, to, drained=drained)
    source = account.queues[0]

    def stage():
        account.clear()
        source.publish_many(BODIES)
        bury_all(source)

    every_point(redis_server.port, redrive, to, stage=stage, check=account.check, least=4)


def test_file_publish_killed_at_any_point_is_finished_by_a_repetition(client, url, redis_server, tmp_path):
    lines = [f"line {number}" for number in range(600)]
    file = tmp_path / "lines"
    file.write_text("\n".join(lines))
    account = Account(client, url, publish_lines, file, drained=True, bodies=lines)

    every_point(redis_server.port, publish_lines, file, stage=account.clear, check=account.check, least=2)
