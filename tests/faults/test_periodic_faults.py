"""Eight processes with the same periodic jobs are killed, stopped and replaced, and Redis loses its data."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack

import pytest
from broken import stopped
from forked import end_forked, forked
from ticking import POLICIES, SPEED, VERSIONS, clock, entries, tick_for_ever
from waiting import eventually

from reliq import Queue
from reliq.lua.transitions import register
from reliq.metrics.crons import cron_states

pytestmark = pytest.mark.slow

PROCESSES = 8
#: In real seconds: a process stopped for this long is silent for more than a minute of the fast time, longer than any
#: window.
STOP_SECONDS = 65 / SPEED


class Fleet:
    """Processes of one or two versions; the test keeps killing or stopping some of them."""

    def __init__(self, url, began, folder):
        self.chance, self.kills, self._folder = random.Random(7), 0, folder
        self._start = lambda version: (
            version,
            forked(tick_for_ever, url, began, version, self.chance.random(), folder),
        )
        self._live = [self._start("one") for _ in range(PROCESSES)]

    def disturb(self, meanwhile, stopping=2):
        """Stop some processes for longer than any window, and kill others meanwhile."""
        victims = self.chance.sample(self._live, stopping)
        with ExitStack() as stack:
            stack.enter_context(stopped(*(child.pid for _, child in victims)))
            for _ in range(10):
                threading.Event().wait(STOP_SECONDS / 10)
                if alive := [one for one in self._live if one not in victims]:
                    self._kill(self.chance.choice(alive))
                meanwhile()

    def wait_until_all_have_started(self):
        """Wait until no process will register as the newest any more: during a deploy it would take the jobs back."""
        ready = lambda: all((self._folder / str(child.pid)).exists() for _, child in self._live)  # noqa: E731
        eventually(ready, "every process has registered its entries")

    def deploy(self, version, meanwhile):
        """Replace every process by a process of another version."""
        for one in list(self._live):
            self._kill(one, version)
            meanwhile()

    def _kill(self, one, version=None):
        was, child = one
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        self._live[self._live.index(one)] = self._start(version or was)
        self.kills += 1


class Ledger:
    """Records the expected ticks of each period between two changes of the schedules, and their outcome."""

    def __init__(self, url, admin, began):
        self._admin, self._clock, self._version = admin, clock(began), ""
        self._schedules = {
            version: {one.name: str(one.schedule) for one in entries(url, version)} for version in VERSIONS
        }
        self._queues = {policy: Queue(policy, str, url=url) for policy in POLICIES}
        self._begun = dict.fromkeys(POLICIES, (0, 0))  # tick at which a version began, and ticks missed until then
        self.came = {policy: [] for policy in POLICIES}
        self.eras = []  # policy, expected ticks, missed ticks

    def begin(self, version, *, flush=False):
        """Register a version as its first process does, and end the previous version at the same moment."""
        calls = self._registering(version, newest=True)
        with self._admin.pipeline() as pipe:
            for queue in self._queues.values():
                pipe.hgetall(queue.keys.cron).lrange(queue.keys.ready, 0, -1)
            if flush:
                pipe.flushall()
            for call in calls:
                pipe.execute_command(*call.command_in_full)
            answers = pipe.execute()
        for at, policy in enumerate(POLICIES):
            missed = self._end(policy, *answers[2 * at : 2 * at + 2], flush=flush)
            [state] = calls[at].read(answers[at - len(calls)])[1]
            self._begun[policy] = (state.last, missed)
        self._version = version

    def stay(self):
        """Register the version again as a process does: on a busy machine the processes may be late."""
        for call in self._registering(self._version):
            self._admin.execute_command(*call.command_in_full)

    def _registering(self, version, **options):
        now = self._clock()
        return [
            register(queue.keys, [(policy, self._schedules[version][policy])], clock=now, **options)
            for policy, queue in self._queues.items()
        ]

    def _end(self, policy, row, ready, *, flush):
        """Record the end of a version; return the number of ticks that the job has missed so far."""
        [state] = cron_states(self._queues[policy].keys).read(row) or [None]
        if state is None or not self._version:  # a process may have started before the first version
            return 0 if state is None else state.missed
        begun, missed, step = *self._begun[policy], VERSIONS[self._version]
        ticks = [f"cron.{policy}.{tick}" for tick in range(begun + 1, state.last + 1) if tick % step == 0]
        self.eras.append((policy, ticks, state.missed - missed))
        if flush:
            self.came[policy] += [id.decode() for id in ready]
        return 0 if flush else state.missed

    def drain(self):
        for policy, queue in self._queues.items():
            with queue.receive(limit=500) as jobs:
                self.came[policy] += [job.id for job in jobs]


@pytest.fixture
def fleet(server, admin, tmp_path, monkeypatch):
    monkeypatch.setattr("reliq.receive.receiver.TAKE_SECONDS", 60.0)  # on a busy machine Redis may answer late
    began = time.monotonic()
    yield Fleet(server.url, began, tmp_path), Ledger(server.url, admin, began)
    end_forked()


def test_each_tick_is_published_once_or_counted_through_faults(fleet, request):
    processes, ledger = fleet
    rounds = 8 if request.config.getoption("--long") else 1
    ledger.begin("one")

    for _ in range(rounds):
        processes.disturb(ledger.drain)
        processes.wait_until_all_have_started()
        ledger.begin("two")
        processes.deploy("two", ledger.stay)
        processes.disturb(ledger.drain, stopping=3)
        processes.wait_until_all_have_started()
        ledger.begin("one")
        processes.deploy("one", ledger.stay)
        ledger.begin("one", flush=True)
        processes.disturb(ledger.drain, stopping=PROCESSES)  # no process is alive for more than a minute
        threading.Event().wait(0.5)
    ledger.begin("one", flush=True)

    for policy, ticks, missed in ledger.eras:
        published = [id for id in ledger.came[policy] if id in set(ticks)]
        assert len(published) == len(set(published)), (policy, published)
        assert len(published) + missed == len(ticks), (policy, missed, len(published), len(ticks))
        assert missed == 0 or policy != "all"
    came = [id for ids in ledger.came.values() for id in ids]
    assert len(came) == len(set(came))
    assert sum(len(ticks) for policy, ticks, _ in ledger.eras if policy == "all") >= 60
    assert sum(missed for policy, _, missed in ledger.eras if policy == "skip") > 0
    assert processes.kills >= 30
