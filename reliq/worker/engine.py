"""
The engine of a worker process: it makes all parts, starts them, and stops them in order.

The lifespan is entered before the first claim and left after the last handler. `Drained` tells a drain when the queues are
empty.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from reliq.errors import ConfigurationError, LoginError, RedisUnavailableError, ReliqError
from reliq.events import Observer, WorkerStopping, notify
from reliq.handlers.settlement import RELEASED
from reliq.keys import Keys, token
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.commands import raise_first
from reliq.redis.connection import ServerVersion
from reliq.redis.server import WORKER_TIMEOUT_SECONDS, Connection
from reliq.settings import BATCH_LIMIT, WorkerSettings
from reliq.text import pluralize
from reliq.wire_format import Backoff
from reliq.worker.claims import ServedQueues
from reliq.worker.fetcher import Fetcher
from reliq.worker.health import EngineStats
from reliq.worker.loop import EventQueue, Loop
from reliq.worker.runner import AsyncExecutor, ErrorHook, NoteStep, Runner, ThreadExecutor
from reliq.worker.settler import Renewer, Settler
from reliq.worker.slots import HandlerCall, HeldDelivery, Inflight
from reliq.worker.upkeep import Heartbeat, Janitor, Scheduler, Ticker, stack_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.handlers.handler import Handler, Job
    from reliq.handlers.registration import Periodic
    from reliq.message import Counts
    from reliq.outbox.relay import OutboxMover


logger = logging.getLogger("reliq")

#: An async lifespan has this long to end, because a handler may hold its event loop.
LEAVE_SECONDS = 10.0
#: A drain also waits for messages that come due within this time.
SOON_SECONDS = 1.0
#: The log says at most this often why a drain waits.
REPORT_SECONDS = 10.0
#: At a stop, the settler has this long after the last handler to settle.
LAST_SETTLE_SECONDS = 5.0
#: A stop reports every 5 s how many handlers it waits for.
STOP_REPORT_SECONDS = 5.0
#: The shortest wait for a reply: a wait for work in Redis takes a second of it.
LEAST_REPLY_SECONDS = 2.0


def enter_lifespan(make: Callable[[], Any], tasks: AsyncExecutor) -> tuple[Any, Callable[[], Any]]:
    """
    Enter a context manager; an async one is entered and left within one task of the handlers' own event loop.

    Returns:
        what it yields, and a function that leaves it. Whatever it raises is raised here.
    """
    manager = make()
    if not hasattr(manager, "__aenter__"):
        return manager.__enter__(), partial(manager.__exit__, None, None, None)
    entered: Future[Any] = Future()
    over = asyncio.Event()
    ended = tasks.run(live(manager, entered, over))

    async def end() -> None:
        over.set()

    def leave() -> None:
        tasks.run(end()).result(LEAVE_SECONDS)
        ended.result(LEAVE_SECONDS)

    return entered.result(), leave


async def live(manager: Any, entered: Future[Any] | asyncio.Future[Any], over: asyncio.Event) -> None:
    """Enter `manager`, set in `entered` what it yields or raises, and leave it when it is `over`, all in one task."""
    try:
        state = await manager.__aenter__()
    except BaseException as error:
        entered.set_exception(error)
        return
    entered.set_result(state)
    await over.wait()
    await manager.__aexit__(None, None, None)


class Drained:
    """Checks whether the queues are empty but for what is due later, and logs from time to time what is left."""

    def __init__(self, client: Client, served: ServedQueues, inflight: Inflight) -> None:
        self._client = client
        self._served = served
        self._inflight = inflight
        self._report_at = time.monotonic() + REPORT_SECONDS

    def look(self, *, delayed: bool) -> bool:
        """Return whether nothing is left; with `delayed`, messages that are due later count."""
        try:
            left = self._left(delayed=delayed)
        except ReliqError as error:
            left = [f"for Redis: {error}"]
        if left and time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + REPORT_SECONDS
            logger.info("draining: waits %s", "; ".join(left))
        return not left

    def _left(self, *, delayed: bool) -> list[str]:
        """Return what is left, in words."""
        if held := len(self._inflight.deliveries()):
            return [f"for {pluralize(held, 'message')} held here"]
        shards = self._served.shards()
        left = []
        for keys, counts in zip(shards, self._answers([transitions.counts(keys) for keys in shards]), strict=True):
            if counts.alive and not counts.paused and (delayed or self._is_due(keys, counts)):
                states = ("ready", "retry", "waiting", "unack", "pending", "garbage")
                counted = [f"{count} {state}" for state in states if (count := getattr(counts, state))]
                left.append(f"for {keys.name}: {', '.join(counted)}")
        return left

    def _is_due(self, keys: Keys, counts: Counts) -> bool:
        """Return whether a message of a queue can run now or soon, or is leased."""
        # In a queue with keys, a message that is throttled is among the due ones: only a look says whether one may start.
        if counts.garbage or (counts.due and not counts.keyed):
            return True
        soon = time.time() + SOON_SECONDS
        # In the order in which messages move: one that another worker promotes or claims meanwhile is counted last.
        (moved, next_in_ms), look, unack, last = self._answers(
            [
                transitions.promote(keys),
                transitions.claim(keys, CallNumber(token(), 1), limit=0, lease_ms=1),
                commands.held(keys),
                transitions.counts(keys),
            ]
        )
        has_moved = (last.due and not last.keyed) or last.garbage or min(last.unack, BATCH_LIMIT) != len(unack)
        if moved or look.behind or 0 <= next_in_ms <= SOON_SECONDS * 1000 or has_moved:
            return True
        words = self._answers([commands.state_words(keys, [id for id, _ in unack])])[0] if unack else []
        return any(not isinstance(word, Backoff) or due <= soon for word, (_, due) in zip(words, unack, strict=True))

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        return raise_first(self._client.run_all(requests))


class Engine:
    """
    The parts of one worker process.

    Messages go fetcher → runner → settler. Beside them the renewer keeps leases alive and the scheduler makes messages
    claimable; the ticker publishes periodic jobs, if there are any. `start` and `stop` may each be called once.

    Attributes:
        is_drained: returns whether nothing is held here and every queue is empty; with `delayed`, messages that are due
            later count.
        unfinished: deliveries that the stop cut off, or could not give back; None before the end of its grace.
    """

    unfinished: list[HeldDelivery] | None = None

    def __init__(
        self,
        handlers: Sequence[Handler],
        connection: Connection,
        settings: WorkerSettings,
        *,
        lifespan: Callable[[], Any] | None = None,
        middleware: Sequence[Callable[[Job[Any]], Any]] = (),
        observers: Sequence[Observer] = (),
        on_error: Sequence[ErrorHook] = (),
        periodic: Sequence[Periodic] = (),
        relay: OutboxMover | None = None,
    ) -> None:
        self._settings = settings
        self._lifespan = lifespan
        self._leave_lifespan: Callable[[], Any] = lambda: None
        self._relay = relay
        self._observers = observers
        self._event_queue = EventQueue(observers)
        part_observers = [self._event_queue] if observers else []  # without observers no events are made
        self._client = client = Client.to(connection, reply_seconds(handlers), part_observers)
        self._served = served = ServedQueues(handlers, connection.maps)
        self.inflight = inflight = Inflight(handlers, settings.concurrency)
        self.is_drained = Drained(client, served, inflight).look
        inflight.max_jobs = settings.max_jobs or math.inf
        self.stopping = threading.Event()

        def collect_soon() -> None:
            self._loops["janitor"].wake()

        self._settler = Settler(client, inflight, collect_soon)
        settle = self._settler.settle
        self._runner = Runner(
            settle, middleware, observers, self.stopping, on_error=on_error, error_text=settings.log_error_text
        )
        self._threads = ThreadExecutor(self._runner, inflight)
        self._tasks = AsyncExecutor(self._runner, inflight)
        inflight.call_loop = partial(self._tasks.call, self._tasks.fill)
        self._renewer = Renewer(client, handlers, inflight, self._tasks, settle, self._runner.report_overrun)
        self._scheduler = Scheduler(client, handlers, collect_soon, self._renewer.is_behind)
        self._heartbeat = Heartbeat(
            client,
            served,
            inflight,
            lambda: self._fetcher.last_claim_at,
            lambda: stack_report(inflight.runs(), self._tasks.thread_id),
        )
        self._fetcher = Fetcher(
            client, served, inflight, self._scheduler, self._threads.submit, settle, self._heartbeat.workers
        )
        steps = {
            "settler": self._settler.step,
            "renewer": self._renewer.step,
            "scheduler": self._scheduler.step,
            "janitor": Janitor(client, served, connection, self._heartbeat.workers).step,
            "heartbeat": self._heartbeat.step,
            "fetcher": self._fetcher.step,
        }
        if periodic:
            steps["ticker"] = Ticker(client, periodic).step
        if relay:
            steps["relay"] = relay.step
        self._loops = {
            name: Loop(name, step, part_observers, lambda: self._scheduler.spare(None)) for name, step in steps.items()
        }
        self._scheduler.wake = self._loops["scheduler"].wake
        self._heartbeat.wake = self._loops["heartbeat"].wake

    def start(
        self,
        entered: Callable[[], None],
        before_call: Callable[[HandlerCall], None] | None = None,
        note_step: NoteStep | None = None,
    ) -> None:
        """
        Check the server, write the limits that queues declare, enter the lifespan, start every part.

        Args:
            entered: called when the lifespan is entered and nothing is worked yet.
            before_call: notes a call in the thread that begins it, before the first instruction of its handler.
            note_step: notes each step of a coroutine handler, as `AsyncExecutor` describes.

        Raises:
            ConfigurationError: the server is too old, or may evict messages.
            RedisUnavailableError, RedisRefusedError: Redis cannot be asked.
        """
        check_server(self._client, allow_eviction=self._settings.allow_eviction)
        self._served.read(self._client)
        if refused := self._served.write_limits(self._client):
            raise refused[0]
        self._tasks.note_step = note_step
        self._tasks.start()
        try:
            if self._lifespan is not None:
                self._runner.state, self._leave_lifespan = enter_lifespan(self._lifespan, self._tasks)
        except BaseException:
            self._tasks.close()
            raise
        self._runner.before_call = before_call
        entered()
        self._event_queue.start()
        for loop in self._loops.values():
            loop.start()

    def stop(self, grace_seconds: float) -> list[HeldDelivery]:
        """
        Take no more messages, give back what has not started, let handlers end, settle.

        Returns:
            What still runs after `grace_seconds`, its leases left to end.
        """
        until = time.monotonic() + grace_seconds
        self.stopping.set()
        self.stop_claiming()
        while (left := until - time.monotonic()) > 0:
            if self.inflight.wait_until_none_runs(min(left, STOP_REPORT_SECONDS)):
                break
            running = len(self.inflight.runs())
            left = until - time.monotonic()
            if running and left > 0:
                notify(self._observers, [WorkerStopping("", running, left)])
        self._tasks.cancel_all()
        self.unfinished = cut_off = [held for run in self.inflight.runs() for held in run.deliveries]
        self.inflight.wait_until_settled(LAST_SETTLE_SECONDS)
        self.unfinished = [*cut_off, *(held for held in self.inflight.deliveries() if not held.started)]
        try:
            self._leave_lifespan()
        finally:
            for loop in self._loops.values():
                loop.stop()
            self._settler.nudge()
            if self._relay:
                self._relay.poke()
            for loop in self._loops.values():
                loop.join(WORKER_TIMEOUT_SECONDS)
            if self._relay and not self._loops["relay"].is_running:
                self._relay.close()
            self._heartbeat.leave()
            self._tasks.close()
            self._event_queue.close()
        return cut_off

    def stop_claiming(self) -> None:
        """Take no more messages, give back what has not started; may be called again."""
        fetcher = self._loops["fetcher"]
        fetcher.stop()
        self.inflight.close()
        fetcher.join()
        self._settler.settle(self.inflight.withdraw(self.inflight.deliveries()), RELEASED)
        self._fetcher.hand_on()

    def is_in_handler(self) -> bool:
        """Return whether the caller is a handler: its thread is the event loop, or runs a handler's call."""
        here = threading.get_ident()
        return here == self._tasks.thread_id or any(run.thread == here for run in self.inflight.runs())

    def must_be_replaced(self) -> bool:
        """
        Return whether only another process can go on with the work.

        A part has ended, or handlers hang that only the end of the process ends: half of the slots, or all that is held.
        """
        if dead := self.dead_parts():
            logger.critical("the %s of this process ended by itself: it must be replaced", ", ".join(dead))
            return True
        hung = self.hung_slots
        return hung > 0 and (2 * hung >= self._settings.concurrency or len(self.inflight.runs()) <= hung)

    def dead_parts(self) -> list[str]:
        """Return the names of the parts whose threads have ended although they were not stopped; there should be none."""
        if self.stopping.is_set():
            return []
        parts: dict[str, Loop | ThreadExecutor | AsyncExecutor] = {
            **self._loops,
            "threads of handlers": self._threads,
            "event loop": self._tasks,
        }
        if self.inflight.closed:  # nothing more is claimed or started: these have ended, or will
            del parts["fetcher"], parts["threads of handlers"]
        return [name for name, part in parts.items() if not part.is_running]

    def stats(self) -> EngineStats:
        """Return what this process does at this moment, for health and metrics."""
        now = time.monotonic()
        runs = self.inflight.runs()
        if refusal := self._fetcher.refusal:
            unready = f"all claims fail: {refusal}"
        else:
            unready = self._relay.complaint() if self._relay else ""
        return EngineStats(
            last_claim_at=self._fetcher.last_claim_at,
            is_broken=bool(self.dead_parts()),
            running=sum(len(run.deliveries) for run in runs),
            held=sum(not (held.started or held.settling) for held in self.inflight.deliveries()),
            longest_seconds=max((now - run.started_at for run in runs), default=0.0),
            slots=self.inflight.concurrency,
            busy_slots=len(runs),
            hung_slots=sum(run.hangs for run in runs),
            unready=unready,
        )

    @property
    def hung_slots(self) -> int:
        """How many slots are lost to handlers that overran their time and cannot be ended."""
        return sum(run.hangs for run in self.inflight.runs())


def reply_seconds(handlers: Sequence[Handler]) -> float:
    """
    Return how long a reply of Redis is awaited, in seconds, before the connection is given up and the call repeated.

    An answer that comes after the shortest lease is of no use: the messages it lists have been redelivered by then.
    """
    shortest = min((handler.lease_seconds for handler in handlers), default=WORKER_TIMEOUT_SECONDS)
    return min(WORKER_TIMEOUT_SECONDS, max(LEAST_REPLY_SECONDS, shortest))


def check_server(client: Client, *, allow_eviction: bool) -> None:
    """Raise ConfigurationError when a server is older than 6.2 or may evict messages; what it hides is passed."""
    answers = client.run_everywhere([commands.server_facts(section) for section in ("server", "memory")])
    errors = {name: error for name, facts in answers.items() for error in facts if isinstance(error, Exception)}
    for name, error in errors.items():
        if isinstance(error, LoginError) or (isinstance(error, RedisUnavailableError) and len(errors) == len(answers)):
            raise error
        logger.warning("cannot check the server%s: %s", f" {name}" * bool(name), error)
    for name in answers.keys() - errors.keys():
        server, memory = answers[name]
        ServerVersion.read(server).check()
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and not allow_eviction:
            raise ConfigurationError(
                f"Redis may evict messages: maxmemory-policy must be noeviction, not {policy}{f' at {name}' * bool(name)}; "
                f"set it, or start with --allow-eviction if losing messages is acceptable"
            )
