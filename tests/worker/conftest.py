"""Fixtures of the worker tests: an observer with waits, and consumers that are always stopped."""

import threading
import time
from collections import Counter
from functools import wraps
from types import SimpleNamespace

import pytest

from reliq import Consumer, Queue, WorkerSettings
from reliq.keys import new_id, token
from reliq.lua.transitions import CallNumber, publish
from reliq.message import Claimed
from reliq.redis.client import Client
from reliq.redis.server import WORKER_TIMEOUT_SECONDS, Connection
from reliq.redis.shards import ShardMap
from reliq.testing.server import EmbeddedRedis
from reliq.wire_format import envelope_rest
from reliq.worker.claims import ServedQueues
from reliq.worker.fetcher import Fetcher
from reliq.worker.slots import Inflight, deliveries_of
from reliq.worker.upkeep import Scheduler

#: Maximum wait for an event; a test continues as soon as the event arrives.
PATIENCE_SECONDS = 30.0
#: Seconds; longer than any test.
NEVER_SECONDS = 3600.0


class Recorder:
    """An observer that keeps every event, with waits for events."""

    def __init__(self):
        self.events = []
        self._came = threading.Condition()

    def __call__(self, event, /):
        with self._came:
            self.events.append(event)
            self._came.notify_all()

    def of(self, kind, **fields):
        """Return the events of a kind with these field values."""
        with self._came:
            return self._of(kind, fields)

    def ids(self, kind, **fields):
        """Return the message ids of these events, in order."""
        return [id for event in self.of(kind, **fields) for id in (getattr(event, "ids", None) or (event.id,))]

    def wait_for(self, kind, count=1, timeout=PATIENCE_SECONDS, **fields):
        """Wait until events of a kind contain `count` messages; return the events."""

        def enough():
            return sum(len(getattr(e, "ids", "1")) for e in self._of(kind, fields)) >= count

        with self._came:
            assert self._came.wait_for(enough, timeout), f"no {count} {kind.__name__} {fields}: {self._summary()}"
            return self._of(kind, fields)

    def _of(self, kind, fields):
        return [e for e in self.events if isinstance(e, kind) and all(getattr(e, k) == v for k, v in fields.items())]

    def _summary(self):
        return dict(Counter(type(event).__name__ for event in self.events))


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def make_queue(url):
    """Make a queue on the server under test."""
    return lambda name="q", body=str, **options: Queue(name, body, url=url, **options)


@pytest.fixture
def queue(make_queue):
    return make_queue()


@pytest.fixture
def consumer(url, recorder):
    return Consumer(url, observers=[recorder])


@pytest.fixture
def acking(queue, consumer):
    """The test's consumer, whose handler of the queue does nothing."""
    consumer.handler(queue)(lambda body: None)
    return consumer


@pytest.fixture
def serve(make_queue, consumer):
    """Make a queue with a backlog and a handler of the test's consumer that does nothing."""

    def make(name="q", bodies=(), **options):
        queue = make_queue(name, **options)
        consumer.handler(queue)(lambda body: None)
        queue.publish_many(bodies)
        return queue

    return make


@pytest.fixture(params=["plain", "async"])
def as_kind(request):
    """Turn a plain function into a plain or a coroutine handler."""

    def make(function):
        @wraps(function)
        async def ahandle(*arguments):
            return function(*arguments)

        return ahandle if request.param == "async" else function

    return make


@pytest.fixture(params=["raised", "returned"])
def give(request):
    """Raise or return an outcome, as a handler does."""

    def make(answer):
        if request.param == "raised":
            raise answer
        return answer

    return make


@pytest.fixture
def start(consumer):
    """Start a consumer, by default the test's; stop all started consumers at the end of the test."""
    started = []

    def make(chosen=consumer, **settings):
        chosen.start(WorkerSettings(**settings))
        started.append(chosen)
        return chosen._engine

    yield make
    for one in started:
        one.stop(grace=0)


@pytest.fixture
def work_until(start, recorder):
    """Start the test's consumer and wait for `count` messages in events of a kind; return these events."""

    def make(kind, count=1, *, concurrency=16, **fields):
        start(concurrency=concurrency)
        return recorder.wait_for(kind, count, **fields)

    return make


@pytest.fixture
def hold(start, gate):
    """Start a consumer whose handler keeps message `x` running until the gate opens; return its engine."""

    def make(consumer, queue, concurrency=16, **options):
        consumer.handler(queue, **options)(lambda body: gate.pass_through())
        queue.publish("x", id="x")
        engine = start(consumer, concurrency=concurrency)
        gate.wait_for()
        return engine

    return make


@pytest.fixture
def workers(url, recorder, start):
    """Start several consumers of some queues."""

    def make(count, *queues, handle=lambda body: None):
        for _ in range(count):
            consumer = Consumer(url, observers=[recorder])
            for queue in queues:
                consumer.handler(queue)(handle)
            start(consumer)

    return make


@pytest.fixture
def no_looks(monkeypatch):
    """A worker that never polls its queues: it finds messages only through wake tokens and due times."""
    monkeypatch.setattr("reliq.worker.fetcher.POLL_SECONDS", NEVER_SECONDS)
    monkeypatch.setattr("reliq.worker.upkeep.ROUND_SECONDS", 2 * NEVER_SECONDS)  # the first round has run by then
    monkeypatch.setattr("reliq.worker.engine.WORKER_TIMEOUT_SECONDS", 2 * NEVER_SECONDS)
    monkeypatch.setattr("reliq.worker.engine.LEAST_REPLY_SECONDS", 2 * NEVER_SECONDS)
    monkeypatch.setattr("reliq.worker.engine.Planner.step", lambda planner: NEVER_SECONDS)  # it polls for schedules


@pytest.fixture
def no_returns(monkeypatch):
    """A worker that returns no message because it waits for its start; without this, a pause of 0.1 s is enough."""
    monkeypatch.setattr("reliq.worker.settler.HOLD_SECONDS", NEVER_SECONDS)


@pytest.fixture
def quick_beats(monkeypatch):
    """Let a worker write its record and read its queues' shard maps many times a second."""
    monkeypatch.setattr("reliq.worker.upkeep.BEAT_SECONDS", 0.05)


@pytest.fixture
def clock(monkeypatch):
    """Hold the fetcher's clock: time passes, and polls are due, only when the test moves the clock."""
    clock = SimpleNamespace(now=1000.0)
    held = SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr("reliq.worker.fetcher.time", held)
    return clock


@pytest.fixture
def ran(client):
    """Return how often a server has run each client command since its start, without INFO."""

    def count(client=client):
        stats = client.info("commandstats")
        stats.pop("cmdstat_info", None)
        return Counter({name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()})

    return count


@pytest.fixture
def caller(url, recorder):
    """A client for single calls, like the client that the parts of a worker use."""
    return Client(Connection.to(url).wire(WORKER_TIMEOUT_SECONDS), [recorder])


@pytest.fixture
def inflight_of(consumer):
    """Make the list of in-flight messages of a worker process, without the threads of its slots."""
    return lambda concurrency=1, consumer=consumer: Inflight(consumer.handlers, concurrency)


@pytest.fixture
def new_deliveries(consumer):
    """Make deliveries of messages that are not in Redis, by default for the consumer's first handler."""

    def make(amount=1, handler=None, age=0.0):
        claimed = [Claimed(str(number), "me.1:5000", 3) for number in range(amount)]
        return deliveries_of(claimed, handler or consumer.handlers[0], time.monotonic() - age)

    return make


@pytest.fixture
def fetcher_of(caller, inflight_of):
    """Make a fetcher without a thread, and the list of deliveries that it submits; the test runs each of its rounds."""

    fetchers = []

    def make(consumer, concurrency=4, *, client=caller, served=None, workers=lambda: 1, submit=None):
        served = served or ServedQueues(consumer.handlers)
        inflight, held = inflight_of(concurrency, consumer), []
        scheduler = Scheduler(client, consumer.handlers, lambda: None)
        fetcher = Fetcher(client, served, inflight, scheduler, submit or held.extend, lambda *_: None, workers)
        fetchers.append(fetcher)

        def step(times=1):
            for _ in range(times):
                fetcher.step()

        return SimpleNamespace(fetcher=fetcher, step=step, inflight=inflight, scheduler=scheduler, held=held)

    yield make
    for fetcher in fetchers:
        fetcher.hand_on()


class Gate:
    """A gate in a handler: the test waits until the handler has reached it, then opens it."""

    def __init__(self):
        self._inside = threading.Semaphore(0)
        self._open = threading.Event()

    def pass_through(self):
        self._inside.release()
        assert self._open.wait(PATIENCE_SECONDS), "nobody opened the gate"

    def wait_for(self, count=1):
        for _ in range(count):
            assert self._inside.acquire(timeout=PATIENCE_SECONDS), "nobody came to the gate"

    def open(self):
        self._open.set()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def threads_since():
    """Return the worker threads that have started since an earlier call."""
    return lambda before=(): {one for one in threading.enumerate() if one.name.startswith("reliq")} - set(before)


@pytest.fixture
def own_server(server_path):
    """A server that a test may kill and restart; it writes everything to disk immediately."""
    with EmbeddedRedis(server=server_path, options={"appendonly": "yes", "appendfsync": "always"}) as server:
        yield server


@pytest.fixture
def own_queue(own_server):
    return Queue("q", str, url=own_server.url)


@pytest.fixture
def own_consumer(own_server, recorder):
    """A consumer of the server that a test may kill; it stops at the end of the test."""
    consumer = Consumer(own_server.url, observers=[recorder])
    yield consumer
    consumer.stop(grace=0)


class Meter:
    """Counts the handlers that run at once: now, and the maximum so far."""

    def __init__(self):
        self.most = self.now = 0
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self._lock:
            self.now -= 1


@pytest.fixture
def meter():
    return Meter()


@pytest.fixture
def spread(client):
    """Set the number of shards of a queue, as an operator does; return the keys of its shards."""

    def make(queue, number, epoch=1, at=client):
        at.set(queue.keys.map, ShardMap(epoch, number, number).text)
        return [queue.keys.of_shard(shard) for shard in range(number)]

    return make


@pytest.fixture
def put(caller):
    """Publish bodies to one shard."""

    def make(keys, bodies, *, delay_ms=0, by=caller):
        items = [(new_id(keys.shard), envelope_rest(3) + body.encode()) for body in bodies]
        by.run(
            publish(keys, items, CallNumber(token(), 1), ttl_ms=60_000, retries=3, delay_ms=delay_ms, fence="1 16 16")
        )

    return make
