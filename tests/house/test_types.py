"""mypy and pyright reject a wrong body, option or handler, and accept the programs in the docs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from required import module_of_ci

ROOT = Path(__file__).parents[2]

GOOD = """
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypedDict, assert_type

from reliq import AsyncAdmin, BulkResult, CancelStatus, Consumer, Duration, Durability, Event, Job, DeadLetter, Nack
from reliq import Observer, OutgoingMessage, PublishOptions, Queue, Receipt, ReceivedJob, Reject, Snooze, Tasks
from reliq.admin import Entry, Filter, Overview, Tally
from reliq.events import Acked
from reliq.testing import DrainResult, Published, Reliq, isolated


@dataclass
class Order:
    id: int


@dataclass
class Created:
    id: int


@dataclass
class Deleted:
    id: int
    why: str


class Mail(TypedDict):
    to: str


class BadCard(Exception):
    pass


@asynccontextmanager
async def lifespan() -> AsyncIterator[dict[str, str]]:
    yield {"gateway": "up"}


ORDERS = Queue("orders", Order, retries=12, ttl=timedelta(days=7))
MAILS = Queue("mails", Mail)
EVENTS = Queue("events")
NUMBERS = Queue("numbers", list[int])
MAYBE = Queue("maybe", Order | None, validate=False)
EITHER = Queue("either", Created | Deleted)
TOLD = Queue("told", Annotated[Created | Deleted, "told by its kind"], ttl=60)


def watch(event: Event) -> None:
    if isinstance(event, Acked):
        assert_type(event.ids, tuple[str, ...])


WATCHES: Observer = watch
consumer = Consumer(lifespan=lifespan, observers=[WATCHES])

assert_type(ORDERS, Queue[Order])
assert_type(MAILS, Queue[Mail])
assert_type(EVENTS, Queue[dict[str, Any]])
assert_type(NUMBERS, Queue[list[int]])
assert_type(MAYBE, Queue[Order | None])
assert_type(EITHER, Queue[Created | Deleted])
assert_type(TOLD, Queue[Created | Deleted])


@consumer.handler(ORDERS, lease=30, timeout=300, concurrency=4, reject_on=(BadCard,))
def close_unpaid(order: Order, job: Job[Order]) -> None:
    assert_type(job.body, Order)
    assert_type(job.attempt, int | None)
    if order.id == 0:
        raise Snooze(delay=30, reason="gateway busy")


@consumer.handler(MAILS)
async def send(mail: Mail) -> Nack | Reject | None:
    return Nack(delay=timedelta(minutes=1)) if mail["to"] == "" else None


@consumer.handler(Queue("lines", Order), batch=100, linger=0.05, lease=30)
def store(orders: list[Order], jobs: list[Job[Order]]) -> list[Nack | None]:
    assert_type(jobs[0].body, Order)
    return [None for _ in orders]


@consumer.handler(Queue("mass", Mail), batch=100)
async def send_all(mails: Sequence[Mail]) -> None: ...


@consumer.handler("numbers-by-name", batch=10, linger=timedelta(seconds=1))
def add(numbers: list[int]) -> None: ...


@consumer.handler(EVENTS)
def note(event: dict[str, Any]) -> None: ...


@consumer.handler("by-name")
async def untyped(body: dict[str, Any], job: Job[dict[str, Any]]) -> None: ...


@consumer.cron("0 6 * * *", queue=ORDERS, tz="Europe/Berlin", jitter=timedelta(minutes=5), catch_up="all")
def daily(tick: datetime) -> Order:
    return Order(tick.day)


consumer.every(timedelta(minutes=5), queue=ORDERS, body=Order(1), name="fixed", overlap="skip")
consumer.every(5, queue=ORDERS, body=lambda tick: Order(tick.minute), name="made")
assert_type(daily(datetime.now(UTC)), Order)


@consumer.handler(EITHER)
def either(body: Created | Deleted, job: Job[Created | Deleted]) -> None:
    gateway: dict[str, str] = job.state
    _ = gateway


@consumer.handler(MAYBE)
def maybe(order: Order | None) -> None: ...


def ship(received: list[ReceivedJob[Order]], after: Duration) -> list[int]:
    received[0].publish(EITHER, Deleted(1, "late"), delay=3, name="next")
    return [one.body.id for one in received]


def later(order: Order, options: PublishOptions) -> Receipt:
    MAYBE.publish(None)
    EITHER.publish(Deleted(1, "late"))
    return ORDERS.publish(order, **options)


def step(looked: int, done: Tally) -> None: ...


STEPS: Callable[[int, Tally], None] = step


async def of_an_operator(desk: AsyncAdmin) -> CancelStatus:
    assert_type(await desk.queues(), Overview)
    dead: list[Entry] = [entry async for entry in desk.messages("orders", "dead", Filter(reason="failed"))]
    await desk.purge("orders", "ready", Filter(match="x"), on_step=STEPS)
    return (await desk.cancel("orders", [entry.id for entry in dead]))["order-42"]


def anywhere() -> None:
    receipt = ORDERS.publish(Order(42), delay=1800, id="order-42", headers={"tenant": "a"}, durability=Durability.NONE)
    assert_type(receipt, Receipt)
    assert_type(ORDERS.publish_many([Order(1), OutgoingMessage(body=Order(2), delay=5)]), BulkResult)
    EVENTS.publish({"anything": [1, None]})
    NUMBERS.publish([1, 2])
    MAILS.publish({"to": "a@example.com"})
    with ORDERS.receive(limit=10, wait=20) as jobs:
        for job in jobs:
            assert_type(job.body, Order)
            job.nack(delay=5)
    close_unpaid_again = close_unpaid
    send_again = send
    _ = close_unpaid_again, send_again
    ORDERS.cancel("order-42")


async def of_an_inbox(job: Job[Order], tx: Any) -> None:
    if not await job.aonce(tx):
        return
    assert_type(await job.aonce(tx), bool)


async def in_async_code() -> None:
    assert_type(await ORDERS.apublish(Order(42)), Receipt)
    async with ORDERS.areceive() as jobs:
        assert_type(jobs[0].body, Order)
    assert_type(await send({"to": ""}), Nack | Reject | None)


app = Tasks("default", retries=5, ttl=60, url="redis://127.0.0.1", handler={"timeout": 60}, lifespan=lifespan)


@app.task
def bare(to: str, subject: str = "hello") -> int:
    return len(to)


@app.task(name="other", timeout=timedelta(minutes=1), retries=3, aliases=("older",), retry_on=BadCard)
def with_job(job: Job, order: Order, *, tags: list[str]) -> str:
    bare.options(after=job).publish(str(order.id))
    return job.id


@app.task
async def count_later(job: Job[str], to: str) -> int:
    return len(to)


@app.task()
async def soon(to: str) -> int:
    return await soon(to)


@app.cron("0 6 * * *", queue=app.queue)
def nightly(tick: datetime) -> OutgoingMessage[bytes]:
    return bare.outgoing("a")


app.every(60, queue=app.queue, body=bare.outgoing("a"), name="minutely")


async def of_tasks(reliq: Reliq, tx: Any) -> None:
    assert_type(bare("a"), int)
    assert_type(await soon("a"), int)
    assert_type(bare.publish("a", subject="b"), Receipt)
    assert_type(await count_later.apublish("a"), Receipt)
    assert_type(await with_job.options(delay=60, id="x", key="k").apublish(Order(1), tags=["a"]), Receipt)
    assert_type(bare.publish_in(tx, "a"), str)
    app.queue.publish_many(bare.outgoing(to) for to in ["a", "b"])
    assert_type(reliq.perform(app, with_job, Order(1), tags=[]), str)
    assert_type(await reliq.aperform(app, count_later, "a"), int)


def in_a_test(reliq: Reliq) -> None:
    assert_type(reliq.published(ORDERS, state="ready", due=reliq.now), list[Published[Order]])
    assert_type(reliq.assert_published(ORDERS, Order(1)).body.id, int)
    reliq.perform(consumer, ORDERS, Order(2), attempt=2, headers={"a": "b"})
    assert_type(reliq.drain(consumer, scheduled=True), DrainResult)
    reliq.travel(timedelta(days=1))
    with isolated() as other:
        other.refute_published(ORDERS)
"""

HEAD = """
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from reliq import Consumer, Job, OutgoingMessage, Queue, Tasks


@dataclass
class Order:
    id: int


ORDERS = Queue("orders", Order)
EVENTS = Queue("events")
consumer = Consumer()
app = Tasks()


@app.task
def send(to: str, number: int = 0) -> int:
    return number


@app.task(timeout=3)
async def walk(job: Job, to: str) -> int:
    return 1
"""

#: Programs with a type error in the last line.
WRONG = {
    "a handler of another body": "@consumer.handler(ORDERS)\ndef handle(body: str) -> None: ...",
    "a handler of another body with a job": (
        "@consumer.handler(ORDERS)\ndef handle(body: str, job: Job[Order]) -> None: ..."
    ),
    "a job of another body": "@consumer.handler(ORDERS)\ndef handle(body: Order, job: Job[str]) -> None: ...",
    "a handler that takes nothing": "@consumer.handler(ORDERS)\ndef handle() -> None: ...",
    "a batch handler of one body": "@consumer.handler(ORDERS, batch=9)\ndef handle(order: Order) -> None: ...",
    "a batch handler with one job": (
        "@consumer.handler(ORDERS, batch=9)\ndef handle(orders: list[Order], job: Job[Order]) -> None: ..."
    ),
    "a linger without a batch": "@consumer.handler(ORDERS, linger=1)\ndef handle(order: Order) -> None: ...",
    "a publish of another body": "ORDERS.publish('42')",
    "a publish of another body in async code": "async def f() -> None:\n    await ORDERS.apublish(42)",
    "a publish of many other bodies": "ORDERS.publish_many(['42'])",
    "a publish on an untyped queue of no dict": "EVENTS.publish(42)",
    "an option that is none": "Queue('orders', Order, retry=3)",
    "a delay that is no time": "ORDERS.publish(Order(1), delay='soon')",
    "an option of a publish that is none": "ORDERS.publish(Order(1), delya=3)",
    "a periodic body of another type": "consumer.cron('0 6 * * *', queue=ORDERS, body='42', name='x')",
    "a function that makes another body": "consumer.every(5, queue=ORDERS, body=lambda tick: tick, name='x')",
    "a decorated function that makes another body": "@consumer.every(5, queue=ORDERS)\ndef x(tick: datetime) -> str: ...",
    "a periodic job that is not named": "consumer.every(5, queue=ORDERS, body=Order(1))",
    "an option of a periodic job that is none": "consumer.every(5, queue=ORDERS, body=Order(1), name='x', catchup='all')",
    "an option of a next step that is none": "@consumer.handler(ORDERS)\n"
    "def handle(order: Order, job: Job[Order]) -> None:\n    job.publish(ORDERS, order, dely=3)",
    "a next step of another body": "@consumer.handler(ORDERS)\n"
    "def handle(order: Order, job: Job[Order]) -> None:\n    job.publish(EVENTS, order)",
    "a task with an argument of another type": "send.publish(3)",
    "a task without an argument": "send.publish()",
    "a task with an argument too many": "send.options(delay=3).publish('a', 1, 2)",
    "a task with an unknown argument": "send.publish('a', colour='red')",
    "a task with its job as an argument": "def f(job: Job) -> None:\n    walk.publish(job, 'a')",
    "an async task with an argument of another type": "async def f() -> None:\n    await walk.apublish(3)",
    "a task's option that is none": "send.options(dely=3)",
    "a setting of a task that is none": "@app.task(timout=3)\ndef x() -> None: ...",
    "the result of a task taken for another": "text: str = send('a')",
    "a performed task with an argument of another type": "from reliq.testing import Reliq\n"
    "def test_it(reliq: Reliq) -> None:\n    reliq.perform(app, send, 3)",
    "a text as a transaction": "ORDERS.publish_in('nonsense', Order(1))",
    "an async transaction in blocking code": "from psycopg import AsyncConnection\n"
    "def f(tx: AsyncConnection[Any]) -> None:\n    ORDERS.publish_in(tx, Order(1))",
    "a blocking transaction in async code": "import sqlite3\n"
    "async def f(job: Job[Order], tx: sqlite3.Connection) -> None:\n    await job.aonce(tx)",
    "a body that is none of a union": "Queue('either', Order | None).publish('42')",
    "a name that is not public": "from reliq import Queueue",
    "a name of the testing kit that is not public": "from reliq.testing import Relic",
    "a performed body of another type": "from reliq.testing import Reliq\n"
    "def test_it(reliq: Reliq) -> None:\n    reliq.perform(consumer, ORDERS, 'no order')",
    "a published state that is none": "from reliq.testing import Reliq\n"
    "def test_it(reliq: Reliq) -> None:\n    reliq.published(ORDERS, state='gone')",
    "a received body taken for another": "with ORDERS.receive() as jobs:\n    number: str = jobs[0].body",
}


def mypy(*files):
    """Return file, line and message of each mypy error."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent"]
    command += ["--no-incremental", "--config-file=", "--output=json", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode in {0, 1}, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(Path(one["file"]).name, one["line"], one["message"]) for one in found if one["severity"] == "error"]


def pyright(*files):
    """Return file, line and message of each pyright error."""
    module_of_ci("pyright")
    settings = files[0].parent / "pyrightconfig.json"
    settings.write_text(json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=files[0].parent)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"])
        for one in found
        if one["severity"] == "error"
    ]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_type_checker_accepts_right_programs_and_refuses_each_wrong_one(tmp_path, checker):
    good = tmp_path / "good.py"
    good.write_text(GOOD)
    wrong = {tmp_path / f"wrong_{number}.py": what for number, what in enumerate(WRONG)}
    for path, what in wrong.items():
        path.write_text(f"{HEAD}{WRONG[what]}\n")

    found = checker(good, *wrong)

    complained = {name for name, _, _ in found}
    assert [one for one in found if one[0] == good.name] == []
    assert [what for path, what in wrong.items() if path.name not in complained] == []
    assert [one for one in found if one[0] != good.name and one[1] <= HEAD.count("\n")] == [], "of the common head"
