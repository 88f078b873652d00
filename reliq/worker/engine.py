"""
The engine creates, starts and stops the components of a worker process, such as the fetcher and the settler.

It enters the application's lifespan before it claims the first message, and leaves it after the handlers have ended or
the grace period is over. `Drained` checks whether the queues are empty, so that a worker with `--burst` can exit.
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
from reliq.worker.planner import Planner
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

#: How long a shutdown waits for an async lifespan to end. A handler that blocks the event loop could delay it forever.
LEAVE_SECONDS = 10.0
#: A worker with `--burst` does not exit while a scheduled message is due within this time.
SOON_SECONDS = 1.0
#: How often a worker with `--burst` logs the number of remaining messages.
REPORT_SECONDS = 10.0
#: How long a shutdown waits until Redis has stored the outcomes of all handlers. The wait begins when the handlers have
#: ended or have been cancelled after the grace period.
LAST_SETTLE_SECONDS = 5.0
#: How often a shutdown logs the number of running handlers.
STOP_REPORT_SECONDS = 5.0
#: The shortest time-out for a reply from Redis. It must be longer than the blocking commands that wait up to 1 s for
#: new messages.
LEAST_REPLY_SECONDS = 2.0


def enter_lifespan(make: Callable[[], Any], tasks: AsyncExecutor) -> tuple[Any, Callable[[], Any]]:
    """
    Enter the application's lifespan.

    An async lifespan runs in a task on the event loop of the async handlers.

    Args:
        make: the lifespan function of the application; returns a context manager.
        tasks: the executor with the event loop.

    Returns:
        The value that the lifespan yields, and a function that leaves the lifespan. Exceptions of the lifespan are
        raised by this function and by the returned function.
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
    """
    Enter an async context manager, wait until the event `over` is set, and leave the context manager.

    The future `entered` gets the value that the context manager yields, or the exception that entering it raises.
    """
    try:
        state = await manager.__aenter__()
    except BaseException as error:
        entered.set_exception(error)
        return
    entered.set_result(state)
    await over.wait()
    await manager.__aexit__(None, None, None)


class Drained:
    """Check whether all queues are empty, and log the number of remaining messages from time to time."""

    def __init__(self, client: Client, served: ServedQueues, inflight: Inflight) -> None:
        self._client = client
        self._served = served
        self._inflight = inflight
        self._report_at = time.monotonic() + REPORT_SECONDS

    def look(self, *, delayed: bool) -> bool:
        """
        Return whether this process and all queues have no messages left. Paused queues count as empty.

        Messages that are due later count only with `delayed=True`.
        """
        try:
            left = self._left(delayed=delayed)
        except ReliqError as error:
            left = [f"Redis: {error}"]
        if left and time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + REPORT_SECONDS
            logger.info("drain: waiting for %s", "; ".join(left))
        return not left

    def _left(self, *, delayed: bool) -> list[str]:
        """
        Return texts for the log with the numbers of remaining messages; an empty list if no messages remain.

        While this process has claimed messages that are not settled, count only these and not the messages in Redis.
        """
        if held := len(self._inflight.deliveries()):
            return [f"{pluralize(held, 'message')} in this process"]
        shards = self._served.shards()
        left = []
        for keys, counts in zip(shards, self._answers([transitions.counts(keys) for keys in shards]), strict=True):
            if counts.alive and not counts.paused and (delayed or self._is_due(keys, counts)):
                states = ("ready", "retry", "waiting", "unack", "pending", "garbage")
                counted = [f"{count} {state}" for state in states if (count := getattr(counts, state))]
                left.append(f"{keys.name}: {', '.join(counted)}")
        return left

    def _is_due(self, keys: Keys, counts: Counts) -> bool:
        """Return whether a message of a shard can run now or within SOON_SECONDS, or is leased by a worker."""
        # In a queue with message keys, due messages may be throttled. Only a claim shows whether a message may start.
        if counts.garbage or (counts.due and not counts.keyed):
            return True
        soon = time.time() + SOON_SECONDS
        # Read the states in the order in which messages move through them. Then at least one of these commands finds
        # a message that another worker moves to the next state meanwhile.
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
    Run one worker process with all its components.

    The fetcher claims messages, the runner calls their handlers, and the settler sends the outcomes to Redis. Meanwhile
    the renewer renews leases, the scheduler makes due messages claimable, and the ticker publishes periodic jobs.
    `start` and `stop` can be called only once for each engine.

    Args:
        handlers: the registered handlers.
        connection: the connection to Redis.
        settings: the settings of the worker.
        lifespan: returns the application's context manager around all handler calls; None without a lifespan.
        middleware: the middleware of the consumer, the outermost first.
        observers: the observers of the consumer.
        on_error: the hooks of `Consumer.on_error`.
        periodic: the periodic jobs to publish.
        relay: the outbox relay to run in this process; None without a relay.

    Attributes:
        inflight: the deliveries of this process.
        stopping: an event that is set when the shutdown begins.
        is_drained: returns whether this process and all queues have no messages left. Messages that are due later
            count only with `delayed=True`.
        unfinished: the messages whose handlers still ran after the grace period, and the messages that could not be
            returned to Redis; None until the grace period is over.
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
        part_observers = [self._event_queue] if observers else []  # without observers, create no events
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
            "planner": Planner(client, [handler.queue.keys for handler in handlers]).step,
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
        Check the Redis servers, write the declared limits, enter the lifespan and start all components.

        Args:
            entered: called after the lifespan is entered, before the first claim.
            before_call: called before each handler call, in the thread that runs the handler.
            note_step: called before and after each step of a coroutine handler; see `AsyncExecutor`.

        Raises:
            ConfigurationError: Redis is too old, or may evict messages.
            RedisUnavailableError: Redis cannot be reached.
            RedisRefusedError: Redis refuses a command.
        """
        check_server(self._client, allow_eviction=self._settings.allow_eviction)
        self._served.read(self._client)
        if refused := self._served.write_limits(self._client):
            raise refused[0]
        self._served.declare_shared(self._client)
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
        Shut down gracefully: stop claiming, let running handlers finish, and send their outcomes to Redis.

        Prefetched messages are returned to Redis immediately. After `grace_seconds`, running coroutine handlers are
        cancelled.

        Returns:
            The messages whose handlers still run after that. Redis redelivers them when their leases expire.
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
        """Stop claiming and return prefetched messages to Redis; may be called more than once."""
        fetcher = self._loops["fetcher"]
        fetcher.stop()
        self.inflight.close()
        fetcher.join()
        self._settler.settle(self.inflight.withdraw(self.inflight.deliveries()), RELEASED)
        self._fetcher.hand_on()

    def is_in_handler(self) -> bool:
        """Return whether the caller runs in a handler thread or in the event loop of async handlers."""
        here = threading.get_ident()
        return here == self._tasks.thread_id or any(run.thread == here for run in self.inflight.runs())

    def must_be_replaced(self) -> bool:
        """
        Return whether this process must be replaced by a new process.

        It must be replaced if one of its components has stopped unexpectedly, or if hung handlers use at least half of
        all slots, or if all running handlers hang. A handler hangs if it exceeded its timeout and cannot be cancelled.
        """
        if dead := self.dead_parts():
            logger.critical("worker: the %s stopped unexpectedly; this process will be replaced", ", ".join(dead))
            return True
        hung = self.hung_slots
        return hung > 0 and (2 * hung >= self._settings.concurrency or len(self.inflight.runs()) <= hung)

    def dead_parts(self) -> list[str]:
        """Return the names of the components whose threads have ended unexpectedly; normally an empty list."""
        if self.stopping.is_set():
            return []
        parts: dict[str, Loop | ThreadExecutor | AsyncExecutor] = {
            **self._loops,
            "threads of handlers": self._threads,
            "event loop": self._tasks,
        }
        if self.inflight.closed:  # after claiming stops, the fetcher and the handler threads end as planned
            del parts["fetcher"], parts["threads of handlers"]
        return [name for name, part in parts.items() if not part.is_running]

    def stats(self) -> EngineStats:
        """Return the current state of this process, for health checks and metrics."""
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
        """The number of slots used by handlers that exceeded their timeout and cannot be cancelled."""
        return sum(run.hangs for run in self.inflight.runs())


def reply_seconds(handlers: Sequence[Handler]) -> float:
    """
    Return the time-out for a reply from Redis in seconds.

    After the time-out, the client sends the commands again on a new connection.

    A time-out longer than the shortest lease is useless. When a reply to a claim comes so late, the leases of the
    claimed messages have already expired.
    """
    shortest = min((handler.lease_seconds for handler in handlers), default=WORKER_TIMEOUT_SECONDS)
    return min(WORKER_TIMEOUT_SECONDS, max(LEAST_REPLY_SECONDS, shortest))


def check_server(client: Client, *, allow_eviction: bool) -> None:
    """
    Raise ConfigurationError if a Redis server is not supported or may evict messages.

    If a server refuses the command INFO, which this check needs, or if some of several servers are unavailable, log a
    warning and continue.
    """
    answers = client.run_everywhere([commands.server_facts(section) for section in ("server", "memory")])
    errors = {name: error for name, facts in answers.items() for error in facts if isinstance(error, Exception)}
    for name, error in errors.items():
        if isinstance(error, LoginError) or (isinstance(error, RedisUnavailableError) and len(errors) == len(answers)):
            raise error
        logger.warning("worker: cannot check the Redis server%s; continuing: %s", f" {name}" * bool(name), error)
    for name in answers.keys() - errors.keys():
        server, memory = answers[name]
        ServerVersion.check(server)
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and not allow_eviction:
            redis = f"Redis {name}".strip()
            raise ConfigurationError(
                f"{redis} may evict messages: maxmemory-policy must be noeviction, not {policy}; "
                f"set it {commands.PLACES}, or start with --allow-eviction if losing messages is acceptable"
            )
