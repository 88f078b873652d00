"""The handlers that the worker processes of a benchmark run: they do nothing, or note when they began."""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Self

from reliq.admin import calls
from reliq.bench import PARTS
from reliq.distribution import command_of
from reliq.errors import ConfigurationError, ReliqError
from reliq.keys import Keys, new_id, pattern, token
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber
from reliq.message import Outgoing
from reliq.queue import Queue
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.commands import Request, T, Worker, server_facts, server_ms
from reliq.redis.connection import ServerVersion
from reliq.redis.server import PUBLISH_TIMEOUT_SECONDS, Connection, default_url, plain_client
from reliq.redis.url import check_url, masked
from reliq.settings import BATCH_LIMIT, HandlerSettings, QueueSettings, milliseconds
from reliq.text import pluralize
from reliq.wire_format import envelope_rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Job
    from reliq.redis.connection import PooledConnection


BATCHES: dict[str, Any] = {"batch": 100, "linger": 0.05}
#: The handlers that do nothing.
KINDS = ("plain", "async", "batch") if "batch" in HandlerSettings.__dataclass_fields__ else ("plain", "async")


def do_nothing(_body: dict[str, Any]) -> None:
    """Return at once."""


async def do_nothing_async(_body: dict[str, Any]) -> None:
    """Return at once, on the event loop."""


def do_nothing_batch(_bodies: list[dict[str, Any]]) -> None:
    """Return at once, for all of them."""


class Diary:
    """Notes when handlers began, and when their messages were due and sent (unix seconds)."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []

    def note(self, body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        """Note one message: a handler."""
        self._rows.append((time.time(), job.due or 0.0, float(body["sent"])))

    def note_sent(self, sent: float) -> None:
        """Note what was sent at that time and is there now."""
        self._rows.append((time.time(), 0.0, sent))

    def take(self) -> list[tuple[float, float, float]]:
        """Return the rows since the last time."""
        rows, self._rows = self._rows, []
        return rows


def register(consumer: Consumer, queue: Queue[dict[str, Any]], kind: str, diary: Diary) -> None:
    """Register the handler called `kind`, with default settings but for batches of 100."""
    functions: dict[str, Any] = {
        "plain": do_nothing,
        "async": do_nothing_async,
        "batch": do_nothing_batch,
        "timed": diary.note,
    }
    options: dict[str, Any] = BATCHES if kind == "batch" else {}
    consumer.handler(queue, **options)(functions[kind])


#: The parts of a benchmark, in the order in which they are measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """
    One measured number.

    Attributes:
        part: which part of the benchmark it belongs to, such as `drain`.
        bare: what the same Redis does without reliq's engine, in the same unit; None where that means nothing.
    """

    part: str
    name: str
    value: float
    unit: str
    bare: float | None = None

    @property
    def share(self) -> float | None:
        """The value as a share of the bare one."""
        return None if not self.bare else self.value / self.bare


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """
    Everything that one run found.

    Attributes:
        redis: the server's version.
        place: its URL without the password.
    """

    redis: str
    place: str
    figures: list[Figure] = field(default_factory=list)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of `values` do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


WAIT_SECONDS = 120.0


class Cleaner:
    """The process that removes the keys: it begins when the block is entered, and has removed them when it is left."""

    def __init__(self, url: str, queue: str) -> None:
        self._plan = json.dumps({"url": url, "queue": queue}) + "\n"
        self._queue = queue
        self._process: subprocess.Popen[bytes] | None = None
        self.lifeline = -1

    def __enter__(self) -> Self:
        command, env = command_of("reliq.bench.bench")
        theirs, self.lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(command, env=env, stdin=theirs, process_group=0)  # noqa: S603  ours
        finally:
            os.close(theirs)
        os.write(self.lifeline, self._plan.encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.lifeline)
        if self._process is not None and self._process.wait(WAIT_SECONDS) != 0 and kind is None:
            raise ReliqError(f"not every key of queue {self._queue!r} could be removed")


#: A request is tried again for this long while Redis is away.
AWAY_SECONDS = 5.0


def node_of(url: str, queue: str, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> PooledConnection:
    """Return the wire to the server that has a queue; raise ReliqError when it is away."""
    wire = Connection.to(url).wire(timeout_seconds)
    Client(wire).run(server_ms(), for_seconds=AWAY_SECONDS)  # the servers are known then
    return wire.node_for(Keys(queue).ready)


def plain_client_of(url: str, queue: str, timeout_seconds: float) -> Any:
    """Return redis-py's own client of the server that has a queue."""
    return plain_client(url, timeout_seconds, node=node_of(url, queue).server)


#: A body of 100 bytes once it is JSON.
BODY: dict[str, Any] = {"sent": 0, "text": "x" * 80}
CLIENT_TIMEOUT_SECONDS = 5.0
CHECK_DRAIN_SECONDS = 0.02
#: No part takes longer; one that does has failed.
PART_SECONDS = 180.0
#: A delayed message with its body, and room for lists and hashes that grow by doubling.
BYTES_PER_MESSAGE = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a benchmark: numbers of messages, seconds, and rounds for rates."""

    rounds: int = 3
    drained: int = 100_000
    singles: int = 10_000
    many: int = 100_000
    late_seconds: float = 5.0
    pickups: int = 100
    idle_seconds: float = 10.0
    stored: int = 100_000

    @property
    def bytes_needed(self) -> int:
        """About how much memory the messages take in Redis at most."""
        return max(self.drained, self.many, self.stored) * BYTES_PER_MESSAGE


FULL = Scale()
QUICK = Scale(
    rounds=1, drained=20_000, singles=1000, many=20_000, late_seconds=1.0, pickups=20, idle_seconds=2.0, stored=5000
)


class Stage:
    """
    One queue on the Redis at `url`, with what every part of a benchmark does there.

    Attributes:
        queue: of JSON bodies, with default settings.
    """

    def __init__(self, url: str, name: str, scale: Scale, lifeline: int) -> None:
        self.url, self.scale = url, scale
        self.queue: Queue[dict[str, Any]] = Queue(name, url=url)
        self._lifeline = lifeline
        self.client = Client(node_of(url, name, CLIENT_TIMEOUT_SECONDS))

    def workers(self, kind: str, processes: int = 1) -> Workers:
        """Return processes that run the handler called `kind`."""
        return Workers(url=self.url, queue=self.queue.name, kind=kind, processes=processes, lifeline=self._lifeline)

    def fill(self, count: int) -> None:
        """Publish `count` messages that are ready."""
        self.queue.publish_many(BODY for _ in range(count))

    def empty(self) -> None:
        """Delete what is ready and pending, and say so in the account."""
        keys = self.queue.keys
        places: tuple[Literal["ready", "pending"], ...] = ("ready", "pending")
        for place in places:
            while ids := self.ask(calls.ids_at(keys, place, 0, BATCH_LIMIT)):
                self.ask(transitions.purge(keys, ids, state=place))

    def until_empty(self, workers: Workers) -> Iterator[tuple[float, int]]:
        """Yield monotonic seconds and how many messages are alive, until none is; raise after PART_SECONDS."""
        until = time.monotonic() + PART_SECONDS
        while time.monotonic() < until:
            alive = self.ask(transitions.counts(self.queue.keys)).alive
            yield time.monotonic(), alive
            if alive == 0:
                return
            workers.check()
            time.sleep(CHECK_DRAIN_SECONDS)
        raise ReliqError(f"messages were left after {PART_SECONDS:g} s; is this Redis very slow, or the queue paused?")

    def facts(self, section: str) -> dict[str, str]:
        """Return a section of the server's INFO."""
        return self.ask(commands.server_facts(section))

    def clock_offset(self) -> float:
        """Return by how many seconds Redis' clock is ahead of ours, from the quickest of some answers."""
        best = (float("inf"), 0.0)
        for _ in range(10):
            before = time.time()
            at_server = self.ask(commands.server_seconds())
            after = time.time()
            best = min(best, (after - before, at_server - (before + after) / 2))
        return best[1]

    def ask(self, request: Request[T]) -> T:
        """Make a request; while Redis is away, try again for a while."""
        return self.client.run(request, for_seconds=AWAY_SECONDS)


SCAN_COUNT = 1000
CLEANUP_SECONDS = 60.0


def remove(client: Client, node: Client, keys: Keys) -> None:
    """Delete every key of a queue, and its entries in the registries; the key space is read once, in small steps."""
    at, every = -1, pattern(keys.msg("").removesuffix("msg:")) + "*"
    while at:
        at, found = node.run(calls.keys_scanned(every, max(0, at), SCAN_COUNT), for_seconds=CLEANUP_SECONDS)
        if found:
            node.run(calls.delete_keys(found), for_seconds=CLEANUP_SECONDS)
    _dismiss(client, keys)
    client.run(calls.unregister(keys), for_seconds=CLEANUP_SECONDS)


def _dismiss(client: Client, keys: Keys) -> None:
    """Remove the records of workers of this queue that were killed before they could."""
    ids = client.run(commands.worker_ids(), for_seconds=CLEANUP_SECONDS)
    records = client.run_all(commands.worker_records(ids), for_seconds=CLEANUP_SECONDS)
    ours = [one.id for one in records if isinstance(one, Worker) and keys.name in one.queues]
    client.run_all([command for id in ours for command in commands.remove_worker(id)], for_seconds=CLEANUP_SECONDS)


def main() -> int:
    """Wait until the input ends, then remove the keys of the queue that its first line names; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    plan = json.loads(sys.stdin.readline())
    while sys.stdin.read(1):
        pass
    try:
        url, queue = plan["url"], plan["queue"]
        remove(Client(Connection.to(url).wire()), Client(node_of(url, queue)), Keys(queue))
    except ReliqError as error:
        sys.stderr.write(f"reliq: the keys of queue {plan['queue']!r} remain in Redis: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())


SETTLE_SECONDS = 1.5
DELAY = timedelta(hours=1)


def idle(stage: Stage) -> list[Figure]:
    """Count the round trips of a worker that has nothing to do."""
    with stage.workers("plain") as workers:
        time.sleep(SETTLE_SECONDS)
        before, began = workers.look()[0]["round_trips"], time.monotonic()
        time.sleep(stage.scale.idle_seconds)
        after, ended = workers.look()[0]["round_trips"], time.monotonic()
    return [Figure(part="idle", name="one worker", value=(after - before) / (ended - began), unit="round trips/s")]


def memory(stage: Stage) -> list[Figure]:
    """Weigh ready and delayed messages: what Redis uses with them, less what it uses before and after."""
    return [
        Figure(part="memory", name="a ready message", value=_weight(stage, timedelta(0)), unit="bytes"),
        Figure(part="memory", name="a delayed message", value=_weight(stage, DELAY), unit="bytes"),
    ]


def _weight(stage: Stage, delay: timedelta) -> float:
    count = stage.scale.stored
    before = _used(stage)
    stage.queue.publish_many(Outgoing(body=BODY, delay=delay) for _ in range(count))
    full = _used(stage)
    stage.empty()
    return (full - (before + _used(stage)) / 2) / count


def _used(stage: Stage) -> int:
    return int(stage.facts("memory")["used_memory"])


WORKER_START_SECONDS = 60.0
WORKER_ANSWER_SECONDS = 60.0
END_SECONDS = 10.0


class Workers:
    """
    Processes that run one of the benchmark's handlers; a `with` block starts and ends them.

    Args:
        lifeline: a file descriptor that every process holds open as long as it lives.
    """

    def __init__(self, *, url: str, queue: str, kind: str, processes: int, lifeline: int) -> None:
        self._plan = json.dumps({"url": url, "queue": queue, "kind": kind}) + "\n"
        self._number = processes
        self._lifeline = lifeline
        self._processes: list[subprocess.Popen[str]] = []
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed on leaving

    def __enter__(self) -> Self:
        try:
            for _ in range(self._number):
                self._processes.append(self._started())
            for process in self._processes:
                self._answer(process, WORKER_START_SECONDS)
        except BaseException:
            self._end(peaceful=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(peaceful=kind is None)

    def look(self) -> list[dict[str, Any]]:
        """Return what each process has noted since the last look: `rows`, and `round_trips` since its start."""
        for process in self._processes:
            self._send(process, "\n")
        return [self._answer(process, WORKER_ANSWER_SECONDS) for process in self._processes]

    def check(self) -> None:
        """Raise ReliqError when a process has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise ReliqError(f"a worker process of the benchmark ended with {process.returncode}: {self._words()}")

    def _started(self) -> subprocess.Popen[str]:
        command, env = command_of("reliq.bench.child")
        process = subprocess.Popen(  # noqa: S603  ours
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,  # Ctrl-C is for the parent
            pass_fds=(self._lifeline,),
        )
        self._send(process, self._plan)
        return process

    def _send(self, process: subprocess.Popen[str], line: str) -> None:
        if process.stdin is None:
            raise ReliqError("a worker process of the benchmark has no input")
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            raise ReliqError(f"a worker process of the benchmark is gone: {self._words()}") from error

    def _answer(self, process: subprocess.Popen[str], for_seconds: float) -> dict[str, Any]:
        stdout: Any = process.stdout
        readable, _, _ = select.select([stdout], [], [], for_seconds)
        line = stdout.readline() if readable else ""
        if not line:
            raise ReliqError(f"a worker process of the benchmark does not answer: {self._words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _words(self) -> str:
        """Return the last line that a process wrote to its error output."""
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _end(self, *, peaceful: bool) -> None:
        for process in self._processes:
            if not peaceful:
                process.kill()
            if process.stdin is not None and not process.stdin.closed:
                _close(process.stdin)
        until = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._errors.close()


def _close(stream: Any) -> None:
    try:
        stream.close()
    except OSError:
        return  # the process was gone first


CALL_SIZE = 100
LEASE_MS = 30_000
#: The shortest sleep, in seconds, between two looks for what is due.
LEAST_SLEEP_SECONDS = 0.0002


def in_turns(stage: Stage, ours: Callable[[], float], limit: Callable[[Stage], float]) -> tuple[float, float]:
    """Measure both, one after the other, in as many rounds as the scale says; return their medians."""
    pairs = []
    for _ in range(stage.scale.rounds):
        bare = limit(stage)
        pairs.append((ours(), bare))
        stage.empty()
    ours_all, bare_all = zip(*pairs, strict=True)
    return median(ours_all), median(bare_all)


def sets(stage: Stage) -> float:
    """Return how many SETs of 100 bytes a second redis-py makes, one by one."""
    key, body = list_of(stage.queue), b"x" * 100
    with plain_client_of(stage.url, stage.queue.name, CLIENT_TIMEOUT_SECONDS) as client:
        client.ping()
        began = time.perf_counter()
        for _ in range(stage.scale.singles):
            client.set(key, body)
        seconds = time.perf_counter() - began
        client.delete(key)
    return stage.scale.singles / seconds


def publishes(stage: Stage) -> float:
    """Return how many messages a second the script publishes, 100 a call."""
    rate = _fill(stage)
    stage.empty()
    return rate


def drains(stage: Stage) -> float:
    """Return how many messages a second the scripts claim and ack, the bodies read between, 100 a call."""
    _fill(stage)
    lane, calls = token(), stage.scale.many // CALL_SIZE
    began = time.perf_counter()
    for number in range(1, calls + 1):
        taken = stage.ask(
            transitions.claim(stage.queue.keys, CallNumber(lane, number), limit=CALL_SIZE, lease_ms=LEASE_MS)
        ).claimed
        stage.ask(transitions.bodies(stage.queue.keys, [one.id for one in taken], max_body=QueueSettings().max_body))
        stage.ask(transitions.ack(stage.queue.keys, [(one, None) for one in taken]))
    return calls * CALL_SIZE / (time.perf_counter() - began)


def begin_when_due(stage: Stage, dues: Sequence[float], note: Callable[[float], None]) -> None:
    """
    Sleep until messages are due, then promote, claim and read them; call `note` with each one's due time.

    The messages were published; their due times are unix seconds of this machine, in order.

    Raises:
        ReliqError: some have not come PART_SECONDS after the last was due.
    """
    lane, done, number = token(), 0, 0
    while done < len(dues):
        if time.time() > dues[-1] + PART_SECONDS:
            raise ReliqError(f"only {done} of {len(dues)} messages came due; does something else take them?")
        time.sleep(max(LEAST_SLEEP_SECONDS, dues[done] - time.time()))
        stage.ask(transitions.promote(stage.queue.keys, limit=CALL_SIZE))
        number += 1
        taken = stage.ask(
            transitions.claim(stage.queue.keys, CallNumber(lane, number), limit=CALL_SIZE, lease_ms=LEASE_MS)
        ).claimed
        if taken:
            stage.ask(
                transitions.bodies(stage.queue.keys, [one.id for one in taken], max_body=QueueSettings().max_body)
            )
        for due in dues[done : done + len(taken)]:
            note(due)
        stage.ask(transitions.ack(stage.queue.keys, [(one, None) for one in taken]))
        done += len(taken)


def list_of(queue: Queue[Any]) -> str:
    """Return the key of a list, or of a plain string, that lies among the queue's keys and is removed with them."""
    return queue.keys.msg("bare")


@contextmanager
def handing_over(stage: Stage) -> Iterator[Callable[[], object]]:
    """Yield a function that pushes a body with the time in it to the list that `take_over` waits at."""
    with plain_client_of(stage.url, stage.queue.name, CLIENT_TIMEOUT_SECONDS) as client:
        client.ping()  # connects, which is no part of a pickup
        key = list_of(stage.queue)
        yield lambda: client.lpush(key, json.dumps({**BODY, "sent": time.time()}))


def take_over(url: str, queue: Queue[Any], note: Callable[[float], None]) -> None:
    """Wait for bodies in the queue's plain list, for ever; call `note` with the time when each was sent."""
    key = list_of(queue)
    with plain_client_of(url, queue.name, CLIENT_TIMEOUT_SECONDS) as client:
        while True:
            if taken := client.blpop([key], timeout=1):
                note(float(json.loads(taken[1])["sent"]))


def _fill(stage: Stage) -> float:
    """Publish by the script, with the terms of a queue's defaults; return messages a second."""
    terms = QueueSettings()
    value = envelope_rest(terms.retries) + stage.queue.codec.encode(BODY)
    lane, calls = token(), stage.scale.many // CALL_SIZE
    batches = [[(new_id(), value) for _ in range(CALL_SIZE)] for _ in range(calls)]
    began = time.perf_counter()
    for number, batch in enumerate(batches, 1):
        number_of_call = CallNumber(lane, number)
        ttl_ms = milliseconds(terms.ttl)
        stage.ask(transitions.publish(stage.queue.keys, batch, number_of_call, ttl_ms=ttl_ms, retries=terms.retries))
    return calls * CALL_SIZE / (time.perf_counter() - began)


#: Any client publishes at least this many messages a second, so the first is due after the last is published.
SLOWEST_PUBLISH = 1500
PICKUP_PAUSE_SECONDS = 0.03
#: Publishes before the clock counts.
WARM_UP = 5
MS = 1000


def lateness(stage: Stage, rate: int) -> list[Figure]:
    """Let messages come due at `rate` a second while an idle worker waits; the least figure shows that none is early."""
    count = round(rate * stage.scale.late_seconds)
    offset = stage.clock_offset()
    with stage.workers("timed") as workers:
        stage.queue.publish_many(_due(_dues(rate, count), offset))
        rows = _rows(stage, workers, count)
    late = [(began + offset - due) * MS for began, due, _ in rows]
    dues = _dues(rate, count)
    stage.queue.publish_many(_due(dues, offset))
    limit: list[float] = []
    begin_when_due(stage, dues, lambda due: limit.append((time.time() - due) * MS))
    return _figures("lateness", f"at {rate}/s", late, limit)


def pickup(stage: Stage) -> list[Figure]:
    """Publish to an idle worker, one message at a time: from before the publish to the start of the handler."""
    with stage.workers("timed") as workers:
        rows = _picked_up(stage, workers, lambda: stage.queue.publish({**BODY, "sent": time.time()}))
    with stage.workers("bare") as workers, handing_over(stage) as hand_over:
        limit = _picked_up(stage, workers, hand_over)
    return _figures("pickup", "by an idle worker", rows, limit)


def _dues(rate: int, count: int) -> list[float]:
    """Return due times at `rate` a second by this machine's clock, the first when all can have been published."""
    first = time.time() + 1 + count / SLOWEST_PUBLISH
    return [first + number / rate for number in range(count)]


def _due(dues: Sequence[float], offset: float) -> Iterator[Outgoing[dict[str, Any]]]:
    for due in dues:
        yield Outgoing(body=BODY, at=datetime.fromtimestamp(due + offset, UTC))


def _picked_up(stage: Stage, workers: Workers, send: Callable[[], object]) -> list[float]:
    """Send to idle workers, one message at a time; return how many ms each took to arrive."""
    for count in (WARM_UP, stage.scale.pickups):
        for _ in range(count):
            time.sleep(PICKUP_PAUSE_SECONDS)
            send()
        rows = _rows(stage, workers, count)
    return [(began - sent) * MS for began, _, sent in rows]


def _rows(stage: Stage, workers: Workers, count: int) -> list[tuple[float, float, float]]:
    """Wait until everything is done; return the `count` rows that the handlers noted: began, due, sent (unix seconds)."""
    for _ in stage.until_empty(workers):
        pass
    rows: list[tuple[float, float, float]] = []
    until = time.monotonic() + CLIENT_TIMEOUT_SECONDS
    while len(rows) < count:
        workers.check()
        if time.monotonic() > until:
            raise ReliqError(f"only {len(rows)} of {count} messages were noted; does something else take them?")
        rows += [(began, due, sent) for answer in workers.look() for began, due, sent in answer["rows"]]
    return rows


def _figures(part: str, name: str, values: list[float], limit: list[float]) -> list[Figure]:
    return [
        Figure(part=part, name=f"{name}, {label}", value=percentile(values, at), unit="ms", bare=percentile(limit, at))
        for label, at in (("least", 0), ("p50", 50), ("p99", 99))
    ]


#: Kinds of handler and numbers of processes.
COURSES = (*((kind, 1) for kind in KINDS), ("plain", 2))
#: This share of the messages is worked before the clock starts: by then every process is at work.
HEAD_SHARE = 0.1


def drain(stage: Stage, kind: str, processes: int) -> list[Figure]:
    """Work a full queue with default settings; return its rate beside that of the bare scripts."""
    name = f"{kind} handler, {pluralize(processes, 'process', 'processes')}"
    rate, limit = in_turns(stage, lambda: drain_rate(stage, kind, processes), drains)
    return [Figure(part="drain", name=name, value=rate, unit="messages/s", bare=limit)]


def drain_rate(stage: Stage, kind: str, processes: int) -> float:
    """Return messages a second, from the last look before a tenth is done until all are acked."""
    stage.queue.pause(reason="benchmark")
    stage.fill(stage.scale.drained)
    with stage.workers(kind, processes) as workers:
        stage.queue.resume()
        looks = [(time.monotonic(), stage.scale.drained), *stage.until_empty(workers)]
    ahead = [look for look in looks if look[1] >= stage.scale.drained * (1 - HEAD_SHARE)]
    (first, alive), (last, _) = ahead[-1], looks[-1]
    return alive / (last - first)


PUBLISHERS = 100


def one_by_one(stage: Stage) -> list[Figure]:
    """Publish in a loop, each waiting for its receipt; beside it a SET by redis-py."""
    return [_figure("one by one", in_turns(stage, lambda: _one_by_one(stage), sets))]


def many(stage: Stage) -> list[Figure]:
    """Publish many at once, from an iterator."""
    return [_figure("publish_many", in_turns(stage, lambda: _many(stage), publishes))]


def concurrently(stage: Stage) -> list[Figure]:
    """Publish one by one in each of PUBLISHERS coroutines."""
    rates = in_turns(stage, lambda: asyncio.run(_concurrently(stage)), publishes)
    return [_figure(f"{PUBLISHERS} coroutines", rates)]


def _one_by_one(stage: Stage) -> float:
    began = time.perf_counter()
    for _ in range(stage.scale.singles):
        stage.queue.publish(BODY)
    return stage.scale.singles / (time.perf_counter() - began)


def _many(stage: Stage) -> float:
    began = time.perf_counter()
    stage.queue.publish_many(BODY for _ in range(stage.scale.many))
    return stage.scale.many / (time.perf_counter() - began)


async def _concurrently(stage: Stage) -> float:
    each = stage.scale.singles // PUBLISHERS

    async def publisher() -> None:
        for _ in range(each):
            await stage.queue.apublish(BODY)

    await stage.queue.apublish(BODY)  # connects
    began = time.perf_counter()
    await asyncio.gather(*(publisher() for _ in range(PUBLISHERS)))
    seconds = time.perf_counter() - began
    await stage.queue.aclose()
    return each * PUBLISHERS / seconds


def _figure(name: str, rates: tuple[float, float]) -> Figure:
    return Figure(part="publish", name=name, value=rates[0], unit="messages/s", bare=rates[1])


if TYPE_CHECKING:
    Step = tuple[str, Callable[[], list[Figure]]]
    #: Called with the name of the step that begins, how many are done, and how many there are.
    Progress = Callable[[str, int, int], None]

LATENESS_RATES = (100, 1000)
_MIB = 1_048_576


class Bench:
    """
    A benchmark of reliq on the Redis at `url`.

    Args:
        url: None for RELIQ_URL.
        only: some of PARTS; none means all.
        scale: how many messages are worked: FULL takes three minutes, QUICK half a minute and has rougher figures.

    Raises:
        ConfigurationError: there is no such part, or no Redis is named.
    """

    def __init__(self, url: str | None = None, *, only: Sequence[str] = (), scale: Scale = FULL) -> None:
        if unknown := [part for part in only if part not in PARTS]:
            raise ConfigurationError(f"the benchmark's parts are {', '.join(PARTS)}, not {unknown[0]!r}")
        self.url = default_url() if url is None else url
        check_url(self.url)
        self._only, self._scale, self._name = tuple(only) or PARTS, scale, f"bench-{new_id()}"

    @property
    def bytes_needed(self) -> int:
        """About how many bytes the benchmark takes in Redis while it runs."""
        return self._scale.bytes_needed

    def in_use(self) -> str:
        """
        Return what else is in this Redis, empty when it holds nothing.

        Raises:
            ConfigurationError: its `maxmemory` leaves no room for the benchmark.
        """
        memory, keyspace = (self._facts(section) for section in ("memory", "keyspace"))
        limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
        if limit and used + self.bytes_needed > limit:
            raise ConfigurationError(
                f"the benchmark needs about {self.bytes_needed // _MIB} MiB, and this Redis has "
                f"{max(0, limit - used) // _MIB} MiB left below its maxmemory; use --quick, or another Redis"
            )
        sizes = [int(facts.partition("keys=")[2].partition(",")[0]) for facts in keyspace.values() if "keys=" in facts]
        return pluralize(sum(sizes), "key") if sum(sizes) else ""

    def run(self, progress: Progress = lambda _name, _done, _of: None) -> Report:
        """
        Measure, and return what was found; whatever happens, no key of the benchmark stays.

        Raises:
            ReliqError: a part did not end, or Redis is away.
        """
        report = Report(redis=ServerVersion.read(self._facts("server")).text, place=masked(self.url))
        with Cleaner(self.url, self._name) as cleaner:
            stage = Stage(self.url, self._name, self._scale, cleaner.lifeline)
            steps = self._steps(stage)
            for number, (title, step) in enumerate(steps):
                progress(title, number, len(steps))
                report.figures.extend(step())
                stage.empty()
            progress("removing its keys", len(steps), len(steps))
        return report

    def _steps(self, stage: Stage) -> list[Step]:
        steps: dict[str, list[Step]] = {
            "drain": [
                (f"drain: {kind}, {processes}", partial(drain, stage, kind, processes)) for kind, processes in COURSES
            ],
            "publish": [
                ("publish: one by one", partial(one_by_one, stage)),
                ("publish: many", partial(many, stage)),
                ("publish: concurrently", partial(concurrently, stage)),
            ],
            "lateness": [(f"lateness: {rate}/s", partial(lateness, stage, rate)) for rate in LATENESS_RATES],
            "pickup": [("pickup", partial(pickup, stage))],
            "idle": [("idle", partial(idle, stage))],
            "memory": [("memory", partial(memory, stage))],
        }
        return [step for part in PARTS if part in self._only for step in steps[part]]

    def _facts(self, section: str) -> dict[str, str]:
        return Client(node_of(self.url, self._name)).run(server_facts(section), for_seconds=AWAY_SECONDS)
