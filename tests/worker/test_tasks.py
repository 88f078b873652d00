"""Tasks: functions as jobs, many kinds in one queue."""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from pydantic import BaseModel
from tenacity import wait_fixed
from waiting import eventually

from reliq import Admin, BodyError, ConfigurationError, Consumer, Job, Layout, Nack, Reject, Snooze, Tasks
from reliq.events import Acked, DeadLettered, Snoozed
from reliq.tasks import UNKNOWN_LIMIT, leave_to_others


class Address(BaseModel):
    street: str


@dataclass
class Order:
    number: int


@pytest.fixture
def make_tasks(url, recorder):
    return lambda name="default", **options: Tasks(name, url=url, observers=[recorder], **options)


@pytest.fixture
def app(make_tasks):
    return make_tasks(handler={"backoff": wait_fixed(0)})


def body_of(queue, id):
    """Return the stored body of a message."""
    [message] = [one for one in Admin(queue.target).messages(queue.name, "ready") if one.id == id]
    return message.body


def test_one_worker_runs_plain_and_async_tasks_of_one_queue_with_their_arguments(app, start, recorder):
    ran = []

    @app.task
    def send(to: str, subject: str = "hello") -> None:
        ran.append(("send", to, subject, threading.current_thread().name))

    @app.task(timeout=60)
    async def charge(job: Job, order: Order, when: datetime, *, addresses: list[Address]) -> None:
        ran.append(("charge", job.id, order, when, addresses, threading.current_thread().name))

    moment, addresses = datetime(2030, 1, 2, tzinfo=UTC), [Address(street="Elm")]
    send.publish("a@example.org")
    charge.options(id="pay").publish(Order(7), moment, addresses=addresses)
    start(app)
    recorder.wait_for(Acked, 2)

    first, second = sorted(ran, reverse=True)
    assert first[:3] == ("send", "a@example.org", "hello")
    assert first[3].startswith("reliq-handler")
    assert second == ("charge", "pay", Order(7), moment, addresses, "reliq-asyncio")


def test_tasks_are_called_directly_as_the_functions_that_they_are(app):
    @app.task
    def add(one: int, two: int = 2) -> int:
        """Add."""
        return one + two

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    @app.task
    def walk(job: Job[dict], pages: int) -> int:
        return pages

    assert (add(1), asyncio.run(double(4)), add.__name__, add.__doc__) == (3, 8, "add", "Add.")
    assert walk.function(None, 3) == 3
    with pytest.raises(TypeError, match="task 'walk' takes a Job"):
        walk(3)


@pytest.mark.parametrize(
    ("arguments", "named", "complaint"),
    [
        ((), {}, "missing a required argument: 'to'"),
        ((1,), {}, r"got `int` at `\$.to`"),
        (("a",), {"number": "x"}, r"got `str` at `\$.number`"),
        (("a",), {"colour": "red"}, "unexpected keyword argument 'colour'"),
        (("a", 1, None, 4), {}, "too many positional arguments"),
        (("a",), {"other": object()}, r"at `\$.other`"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_refused_at_the_publish(app, arguments, named, complaint):
    @app.task
    def send(to: str, number: int = 0, other=None) -> None: ...

    for call in (send.publish, send.outgoing, lambda *a, **b: asyncio.run(send.apublish(*a, **b))):
        with pytest.raises(BodyError, match=f"task 'send': .*{complaint}"):
            call(*arguments, **named)

    assert app.queue.counts().alive == 0


def test_defaults_are_not_sent_and_the_workers_own_apply(app, make_tasks, start, recorder):
    ran = []

    @app.task
    def send(to: str, tags: list[str] = [], tries: int = None) -> None: ...  # noqa: B006, RUF013

    worker = make_tasks()

    @worker.task(name="send")
    def send_now(to: str, tags: list[str] = ["new"], tries: int = 3) -> None:  # noqa: B006
        ran.append((to, tags, tries))

    receipt = send.publish("a")
    assert body_of(app.queue, receipt.id) == b'{"to":"a"}'
    send.publish("b", tags=["x"])
    start(worker, concurrency=1)
    recorder.wait_for(Acked, 2)

    assert ran == [("a", ["new"], 3), ("b", ["x"], 3)]


def test_options_of_a_publish_do_not_change_the_task(app):
    @app.task(retries=7)
    def send(to: str) -> None: ...

    later = send.options(delay=60, headers={"tenant": "a"}, key="k")
    outgoing = later.options(retries=1).outgoing("a")

    assert (outgoing.delay, outgoing.retries, outgoing.key) == (60, 1, "k")
    assert outgoing.headers == {"tenant": "a", "reliq-task": "send"}
    assert (send.outgoing("a").delay, send.outgoing("a").retries, later.outgoing("a").retries) == (0, 7, 7)
    with pytest.raises(TypeError, match=r"Task.options\(\) got an unexpected .* 'dely'. Did you mean 'delay'"):
        send.options(dely=3)
    assert app.queue.publish_many(send.outgoing(str(n)) for n in range(3)).published == 3
    statuses = [send.options(id="mail-7").publish("a").status for _ in range(2)]
    assert statuses == ["published", "duplicate"]


def test_next_step_of_a_job_is_published_once_though_the_job_runs_twice(app, start, recorder):
    ran = Counter()

    @app.task
    def parent(job: Job) -> None:
        ran["parent"] += 1
        child.options(after=job).publish(3)
        child.options(after=job).publish(4)
        if job.attempt == 1:
            raise Nack(delay=0)

    @app.task
    async def child(number: int) -> None:
        ran[number] += 1

    parent.publish()
    start(app)
    recorder.wait_for(Acked, 3)

    assert ran == {"parent": 2, 3: 1, 4: 1}


def test_each_task_has_its_own_settings(app, start, recorder):
    @app.task(reject_on=KeyError)
    def strict() -> None:
        raise KeyError

    @app.task(retries=1)
    def patient(job: Job) -> None:
        if job.attempt == 1:
            raise KeyError

    @app.task(timeout=0.05, retries=0)
    async def slow() -> None:
        await asyncio.sleep(60)

    for each in (strict, patient, slow):
        each.options(id=each.name).publish()
    start(app)

    recorder.wait_for(DeadLettered, 2)
    recorder.wait_for(Acked, 1)
    letters = {letter.id: letter.reason for letter in app.queue.dead_letters()}
    assert letters == {"strict": "rejected", "slow": "failed"}


@pytest.mark.parametrize("other", [threading.current_thread, asyncio.sleep], ids=["plain", "async"])
def test_unknown_task_is_left_to_a_worker_that_knows_it_without_a_retry_spent(
    make_tasks, start, recorder, clock, caplog, other
):
    old, new = make_tasks(), make_tasks()
    old.task(name="other")(other)
    lefts = []

    @new.task
    def send(job: Job, to: str) -> None:
        lefts.append(job.retries_left)

    send.publish("a")
    start(old)
    recorder.wait_for(Snoozed)
    assert "has messages of the task 'send', which this worker does not have" in caplog.text
    start(new)
    recorder.wait_for(Acked, 1)

    assert lefts == [new.queue.settings.retries]


def test_message_without_the_name_of_a_task_is_an_unknown_task(app, start, recorder):
    app.task(name="send")(lambda: None)
    app.queue.publish(b"{}")
    start(app)

    recorder.wait_for(Snoozed)


class Unknown:
    """A job of a task that this worker does not have; `age` is the time since its publish."""

    queue = "default"

    def __init__(self, clock, age, name="send"):
        self.headers, self.enqueued = {"reliq-task": name}, clock.time() - age

    def left(self, reason=Snooze):
        """Leave the job to others, which raises `reason`; return it."""
        with pytest.raises(reason) as raised:
            leave_to_others(b"", self)
        return raised.value


@pytest.fixture
def clock(monkeypatch):
    """Hold the clock of this process; no task is unknown yet."""
    held = SimpleNamespace(now=1e9)
    held.time = held.monotonic = lambda: held.now
    monkeypatch.setattr("reliq.tasks.time", held)
    monkeypatch.setattr("reliq.tasks._unknown_since", {})
    return held


@pytest.mark.parametrize(("age", "seconds"), [(0, 1), (20, 5), (3600, 15), (86_000, 15)])
def test_unknown_task_is_asked_for_every_1_to_15_seconds(clock, age, seconds):
    assert Unknown(clock, age).left().delay == seconds


def test_unknown_task_is_rejected_after_a_day_and_a_minute_in_this_process(clock):
    """Processes that are replaced every few minutes reject it too. Meanwhile four claims leave it to newer workers."""
    late, young = Unknown(clock, 5 * 86_400), Unknown(clock, 0)
    late.left()
    for _ in range(4):
        clock.now += 15
        assert late.left().delay == 15
    clock.now += 1
    assert "no worker has a task named 'send'" in str(late.left(Reject))
    young.left()
    Unknown(clock, 5 * 86_400, "other").left()


def test_names_of_unknown_tasks_are_remembered_and_logged_once_up_to_a_limit(clock, caplog):
    """For a task beyond the limit, the minute counts from the first task of all."""
    for number in [*range(UNKNOWN_LIMIT + 50)] * 2:
        Unknown(clock, 0, str(number)).left()

    assert len(caplog.records) == UNKNOWN_LIMIT
    Unknown(clock, 86_401, "0").left()
    beyond = Unknown(clock, 86_401, str(UNKNOWN_LIMIT))
    beyond.left()
    clock.now += 61
    beyond.left(Reject)


def test_unknown_task_keeps_the_order_of_its_key(make_tasks, start, recorder):
    """The messages of a key wait for its unknown task; another key goes on."""
    old, new = make_tasks(ordered=True), make_tasks(ordered=True)
    ran = []

    def run(number):
        ran.append(number)

    for app in (old, new):
        app.task(name="known")(run)
    unknown = new.task(name="unknown")(run)
    unknown.options(key="a").publish(1)
    new.tasks["known"].options(key="a").publish(2)
    new.tasks["known"].options(key="b").publish(3)
    start(old)
    recorder.wait_for(Snoozed)
    recorder.wait_for(Acked, 1)
    assert ran == [3]
    old.stop()
    start(new)
    recorder.wait_for(Acked, 3)

    assert ran == [3, 1, 2]


def test_argument_unknown_to_the_worker_does_not_decode_and_is_not_dropped(app, make_tasks, start, recorder):
    new = make_tasks()

    @new.task(name="send", retries=0)
    def newer(to: str, colour: str) -> None: ...

    @app.task
    def send(to: str) -> None: ...

    newer.publish("a", "red")
    start(app)
    recorder.wait_for(DeadLettered)

    [letter] = app.queue.dead_letters()
    assert letter.reason == "undecodable"
    assert "unknown field `colour`" in letter.error or "at `$`" in letter.error


def test_renamed_task_takes_messages_under_its_aliases(app, start, recorder, make_tasks):
    ran = []
    old = make_tasks()

    @old.task(name="shop.tasks.send")
    def before(to: str) -> None: ...

    @app.task(aliases=("shop.tasks.send",))
    def send(to: str) -> None:
        ran.append(to)

    before.publish("old")
    send.publish("new")
    start(app, concurrency=1)
    recorder.wait_for(Acked, 2)

    assert ran == ["old", "new"]


def two_of_one_name(app):
    app.task(name="send")(lambda: None)
    app.task(name="send")(lambda: None)


def alias_of_another(app):
    app.task(name="send")(lambda: None)
    app.task(name="mail", aliases=("send",))(lambda: None)


def variadic(app):
    @app.task
    def send(*to: str) -> None: ...


def positional(app):
    @app.task
    def send(to: str, /) -> None: ...


def job_second(app):
    @app.task
    def send(to: str, job: Job) -> None: ...


def yields(app):
    @app.task
    def send(to: str):
        yield to


def unreadable(app):
    @app.task
    def send(to: "Nothing") -> None: ...  # noqa: F821


@pytest.mark.parametrize(
    ("register", "complaint"),
    [
        (two_of_one_name, "queue 'default' has two tasks named 'send'"),
        (alias_of_another, "queue 'default' has two tasks named 'send'"),
        (variadic, r"parameter \*to: str is not allowed: a publish sends each argument by its name"),
        (positional, "parameter to: str is not allowed: a publish sends each argument by its name"),
        (job_second, "the Job must be the first parameter, not 'job'"),
        (yields, "must return its result, not yield"),
        (unreadable, "the annotations cannot be read: name 'Nothing'"),
        (lambda app: app.task(name="a b")(len), "a task's name must be"),
        (lambda app: app.task(lambda: None), "a task's name must be"),
        (lambda app: Tasks(layout=Layout.hdt3213()), "cannot have the layout hdt3213: its messages have no header"),
        (lambda app: Consumer().include(app, Tasks()), "queue 'default' has two handlers"),
    ],
)
def test_mistakes_raise_at_import(app, register, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        register(app)


def test_unknown_options_are_refused_by_name(app):
    with pytest.raises(TypeError, match=r"Tasks.task\(\) got an unexpected keyword argument 'timout'"):
        app.task(timout=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch'"):
        Tasks(handler={"batch": 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'retry'"):
        Tasks(retry=3)


def test_middleware_hooks_and_lifespan_of_the_consumer_hold_for_tasks(make_tasks, start, recorder):
    seen = []

    @contextmanager
    def lifespan():
        yield "gateway"

    app = make_tasks(lifespan=lifespan)

    @app.middleware
    @contextmanager
    def around(job):
        seen.append(("around", job.headers["reliq-task"]))
        yield

    @app.on_error
    def note(job, error, final):
        seen.append(("failed", job.body.to, str(error), final))

    @app.task(retries=0)
    def send(job: Job, to: str) -> None:
        raise ValueError(job.state)

    send.publish("a")
    start(app)
    recorder.wait_for(DeadLettered)

    assert seen == [("around", "send"), ("failed", "a", "gateway", True)]


def test_periodic_task_and_included_tasks(make_tasks, url, start, recorder):
    ran = []
    app, other = make_tasks(), make_tasks("other")

    @app.task
    def report(day: str) -> None:
        ran.append(day)

    @other.task
    def clean() -> None:
        ran.append("clean")

    @app.every(timedelta(days=1), queue=app.queue)
    def daily(tick: datetime):
        return report.outgoing("today")

    both = Consumer(url, observers=[recorder]).include(app, other)
    clean.publish()
    report.publish("now")
    start(both)
    recorder.wait_for(Acked, 2)
    eventually(lambda: Admin(url).crons(["default"]), "the worker has registered the periodic job")
    Admin(url).run_cron("default", "daily")
    recorder.wait_for(Acked, 3)

    assert sorted(ran) == ["clean", "now", "today"]


@pytest.fixture
def mixed(app, start, recorder, gate):
    """A worker of four slots whose event loop a coroutine task blocks."""
    ran = []

    @app.task
    async def blocks() -> None:
        gate.pass_through()

    @app.task
    async def later() -> None:
        ran.append("later")

    @app.task
    def plain() -> None:
        ran.append("plain")

    blocks.publish()
    engine = start(app, concurrency=4)
    gate.wait_for()
    return app, engine, ran


@pytest.mark.parametrize("backlog", [3, 600])
def test_blocked_loop_does_not_starve_plain_tasks_of_its_queue(mixed, recorder, gate, backlog):
    app, engine, ran = mixed
    later, plain = app.tasks["later"], app.tasks["plain"]
    app.queue.publish_many(later.outgoing() for _ in range(backlog))
    app.queue.publish_many(plain.outgoing() for _ in range(200))

    recorder.wait_for(Acked, 200)
    assert set(ran) == {"plain"}
    gate.open()
    recorder.wait_for(Acked, 201 + backlog, timeout=60)

    assert Counter(ran) == {"plain": 200, "later": backlog}
    assert app.queue.counts().totals.get("retried_lease", 0) == 0
    eventually(lambda: engine.inflight._free == 4, "all slots are free again")
    assert engine.inflight.queues["default"].coroutines == 0


def test_async_tasks_run_while_plain_tasks_wait(app, start, recorder, gate):
    @app.task
    def plain() -> None:
        gate.pass_through()

    @app.task
    async def later() -> None: ...

    app.queue.publish_many(plain.outgoing() for _ in range(3))
    start(app, concurrency=4)
    gate.wait_for(3)
    app.queue.publish_many(later.outgoing() for _ in range(100))

    recorder.wait_for(Acked, 100)
    gate.open()
    recorder.wait_for(Acked, 103)


def test_queue_of_coroutine_tasks_only_is_async(app):
    app.task(name="one")(asyncio.sleep)
    [handler] = app.handlers

    assert handler.is_async
    app.task(name="two")(lambda: None)
    assert (handler.is_async, handler.name) == (False, "tasks one, two")


def test_plain_handlers_are_called_as_before(consumer, queue):
    """A queue without tasks has no routes, so that the fetcher looks at no header."""
    consumer.handler(queue)(lambda body: None)
    [handler] = consumer.handlers

    assert (handler.routes, handler.each) == (None, [handler])
