"""One record of this process in Redis, which expires when the process is killed, and its stacks when they are asked for."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq import commands, stacks
from reliq.distribution import VERSION
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.ids import token
from reliq.roster import BEAT_SECONDS, SLOTS_LIMIT, Slot, Worker
from reliq.worker.declared import write_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Command
    from reliq.client.client import Client
    from reliq.stacks import StackReport
    from reliq.worker.delivery import HandlerCall
    from reliq.worker.inflight import Inflight
    from reliq.worker.served import Served


#: While the server that has the record is away and others answer, the record is written again this often.
BEAT_AGAIN_SECONDS = 1.0
#: A record that is due within this time is sent with a call that is made anyway.
EARLY_SECONDS = 1.0
#: Workers are counted with each fourth record, and those that were silent for an hour forgotten with each twelfth.
COUNT_BEATS, FORGET_BEATS = 4, 12


class Heartbeat:
    """
    Writes this process' record, and takes it away at a clean stop.

    A request for stacks is taken along with it, and what this process must know of others: how many shards its queues
    have by now, which have keys, and how many workers there are.

    Args:
        last_claim_at: says when the last claim round was completed, by the monotonic clock.
        report: says where the handlers stand.

    Attributes:
        wake: lets the next step begin now.
    """

    def __init__(
        self,
        client: Client,
        served: Served,
        inflight: Inflight,
        last_claim_at: Callable[[], float],
        report: Callable[[], StackReport],
    ) -> None:
        self._client, self._inflight, self._last_claim_at, self._report = client, inflight, last_claim_at, report
        self.wake: Callable[[], None] = lambda: None
        self._workers = 1
        self._served = served
        self._asked = self._told = 0  # how many requests were taken, and which was the last that has its answer
        self._queues = tuple(handler.queue.name for handler in served.handlers)
        self._id, self._host, self._version = token(), socket.gethostname(), VERSION
        self._started = time.time()
        self._beat_at, self._beats = float("-inf"), 0

    def step(self) -> float:
        """Write what is asked for and due; return the wait until it is. Where Redis refuses it, the work goes on without."""
        if self._told < self._asked:
            asked = self._asked
            if not self._run([stacks.write_report(self._id, self._report())]):
                return BEAT_AGAIN_SECONDS
            self._told = asked
        write_limits(self._client, self._served)
        rest = self._beat_at + BEAT_SECONDS - time.monotonic()
        if rest > 0:
            return rest
        began = time.monotonic()
        if not self._run(self._beat(), self._questions()):
            return BEAT_AGAIN_SECONDS
        self._beat_at = began
        return BEAT_SECONDS

    def soon(self) -> list[Command[Any]]:
        """Return what writes the record, to go along with a call that is made anyway; nothing when it is not yet time."""
        if self._beat_at + BEAT_SECONDS - EARLY_SECONDS > time.monotonic():
            return []
        self._beat_at = time.monotonic()
        return [*self._beat(), *self._questions()]

    def workers(self) -> int:
        """Return how many worker processes there are; 1 while nobody need know."""
        return self._workers

    def leave(self) -> None:
        """Take the record away."""
        with suppress(ReliqError):
            self._client.run_all([*commands.remove_worker(self._id)])

    def _beat(self) -> list[Command[None]]:
        *written, silent_go = commands.write_worker(self._record())
        self._beats += 1
        seldom = [silent_go] if self._beats % FORGET_BEATS == 1 else []
        return [*written, *seldom, stacks.take_request(self._id, self._note_request)]

    def _questions(self) -> list[Command[Any]]:
        """Return what asks for the shards and keys of the queues, and for the number of workers where a queue is sharded."""
        questions = self._served.questions()
        if self._beats % COUNT_BEATS == 1 and any(map(self._served.is_sharded, self._queues)):
            questions.append(commands.workers_alive(time.time(), self._note_workers))
        return questions

    def _note_workers(self, count: int) -> None:
        self._workers = max(1, count)

    def _note_request(self) -> None:
        self._asked += 1
        self.wake()

    def _run(self, requests: Sequence[Command[None]], questions: Sequence[Command[Any]] = ()) -> bool:
        """Make requests, and ask questions; return whether the servers that have the record were there."""
        answers = self._client.run_all([*requests, *questions])[: len(requests)]
        return not any(isinstance(answer, RedisUnavailableError) for answer in answers)

    def _record(self) -> Worker:
        running = sorted(self._inflight.runs(), key=lambda run: run.started_at)
        now, ticks = time.time(), time.monotonic()
        return Worker(
            id=self._id,
            host=self._host,
            pid=os.getpid(),
            version=self._version,
            queues=self._queues,
            slots=self._inflight.concurrency,
            busy=len(running),
            started=round(self._started, 3),
            last_claim=round(now - (ticks - self._last_claim_at()), 3),
            seen=round(now, 3),
            running=tuple(_slot(run, now - ticks) for run in running[:SLOTS_LIMIT]),
        )


def _slot(run: HandlerCall, epoch: float) -> Slot:
    """Return the record of a slot, for a batch that of its first message; the monotonic clock began at unix time `epoch`."""
    first = run.deliveries[0]
    # An id of a foreign publisher may be any bytes; JSON holds text alone.
    id = first.delivery.id.encode("utf-8", "replace").decode()
    return Slot(first.queue, id, first.delivery.attempt, round(run.started_at + epoch, 3))
