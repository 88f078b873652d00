"""A consumer refuses what cannot work when it is written, not when it runs."""

import subprocess
import sys
import types
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import pytest

from reliq import Consumer, Job, Queue
from reliq.consumer.consumer import load_consumer
from reliq.errors import ConfigurationError

ORDERS = Queue("orders", str)


def takes_nothing(): ...
def takes_three(body, job, more): ...
def needs_a_keyword(body, *, database): ...
def takes_a_wrong_second(body, count: int): ...
def takes_a_job_alone(job: Job[str]): ...
def takes_a_job_first(job: Job, body: str): ...
def takes_a_job_of_others(body: str, job: Job[int]): ...
def yields(body):
    yield body


async def ayields(body):
    yield body


class Callable:
    async def __call__(self, body): ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (takes_nothing, "takes_nothing must take a body and, if it likes, a job; it takes nothing"),
        (takes_three, "it takes body, job, more"),
        (needs_a_keyword, "it takes body, database"),
        (takes_a_wrong_second, "annotate 'count' as Job"),
        (takes_a_job_alone, "the first parameter is the body, the second the Job; 'job' comes first"),
        (takes_a_job_first, "the first parameter is the body, the second the Job; 'job' comes first"),
        (takes_a_job_of_others, "'job' is annotated as Job of int, and queue 'orders' has bodies of str"),
        (yields, "must return its answer, not yield"),
        (ayields, "must return its answer, not yield"),
        ("text", "must be a function, not a str"),
        (dict, "signature"),
    ],
)
def test_a_function_of_another_signature_is_no_handler(function, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Consumer().handler(ORDERS)(function)


def test_a_batch_whose_jobs_come_first_or_are_of_others_is_no_handler():
    def jobs_first(jobs: list[Job[str]]): ...
    def jobs_of_others(bodies: list[str], jobs: list[Job[int]]): ...

    for function, complaint in ((jobs_first, "'jobs' comes first"), (jobs_of_others, "Job of int, and queue 'orders'")):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().handler(ORDERS, batch=5)(function)


@pytest.mark.parametrize(
    ("function", "takes_job", "is_async"),
    [
        (lambda body: None, False, False),
        (lambda body, job: None, True, False),
        (lambda body, retries=3: None, False, False),
        (lambda *, body=None, **rest: None, None, None),
        (partial(takes_three, more=1), True, False),
        (Callable(), False, True),
        (print, False, False),
    ],
)
def test_what_a_handler_takes_is_told_by_its_signature(function, takes_job, is_async):
    consumer = Consumer()
    if takes_job is None or function is print:
        with pytest.raises(ConfigurationError):
            consumer.handler(ORDERS)(function)
        return

    consumer.handler(ORDERS)(function)

    (handler,) = consumer.handlers
    assert (handler.takes_job, handler.is_async) == (takes_job, is_async)
    assert handler.name


def test_a_job_is_recognised_by_its_annotation_though_it_has_a_default():
    consumer = Consumer()

    @consumer.handler(ORDERS)
    def handle(body: str, job: Job[str] | None = None) -> None: ...

    @consumer.handler("other")
    def other(body: str, job: Job[str] = None) -> None: ...

    assert [handler.takes_job for handler in consumer.handlers] == [False, True]


def test_a_decorated_handler_stays_an_ordinary_function():
    @Consumer().handler(ORDERS)
    def double(body: str) -> str:
        return 2 * body

    assert double("a") == "aa"


def test_an_untyped_queue_takes_its_type_from_the_annotation():
    consumer = Consumer()

    @consumer.handler("numbers")
    def handle(body: list[int]) -> None: ...

    assert consumer.handlers[0].codec.decode(b"[1, 2]") == [1, 2]


def test_a_queue_has_one_handler():
    consumer = Consumer()
    consumer.handler(ORDERS)(takes_a_body)

    with pytest.raises(ConfigurationError, match=r"queue 'orders' has two handlers: .*takes_a_body and .*takes_a_body"):
        consumer.handler("orders")(takes_a_body)


def takes_a_body(body): ...


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lease": 0.01}, "lease must be 0.05 to 86400 seconds, not 0.01"),
        ({"timeout": 0}, "timeout must be"),
        ({"concurrency": 0}, "concurrency must be 1 to 10000, not 0"),
        ({"weight": 0}, "weight must be 1 to 1000, not 0"),
        ({"retry_on": "ValueError"}, "retry_on must be exception classes"),
        ({"reject_on": (KeyboardInterrupt,)}, "reject_on must be exception classes"),
        ({"backoff": 5}, "tenacity"),
        ({"undecodable": "drop"}, "undecodable must be 'retry' or 'reject', not 'drop'"),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused_by_name(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Consumer().handler(ORDERS, **options)


@pytest.fixture
def billing(monkeypatch):
    module = types.ModuleType("shop_billing")
    module.consumer = Consumer()
    module.consumer.handler("invoices")(takes_a_body)
    module.consumer.middleware(takes_a_body)
    monkeypatch.setitem(sys.modules, "shop_billing", module)
    return module


def test_a_consumer_includes_others_by_value_and_by_name(billing):
    shipping = Consumer()
    shipping.handler("parcels")(takes_a_body)

    consumer = Consumer().include("shop_billing", shipping)

    assert [handler.queue.name for handler in consumer.handlers] == ["invoices", "parcels"]
    assert load_consumer("shop_billing:consumer") is billing.consumer


def test_an_include_that_would_give_a_queue_two_handlers_changes_nothing(billing):
    consumer = Consumer()
    consumer.handler("invoices")(takes_a_body)
    other = Consumer()
    other.handler("parcels")(takes_a_body)
    other.include("shop_billing")

    with pytest.raises(ConfigurationError, match="two handlers"):
        consumer.include(other)
    assert [handler.queue.name for handler in consumer.handlers] == ["invoices"]


def test_an_included_lifespan_is_refused_for_it_would_never_be_entered():
    other = Consumer(lifespan=lambda: None)

    with pytest.raises(ConfigurationError, match="lifespan"):
        Consumer().include(other)


def test_an_included_consumer_brings_its_server_and_its_observers():
    observer = [].append
    other = Consumer("redis://elsewhere:6379/0", observers=[observer])

    consumer = Consumer().include(other)

    assert consumer.target == "redis://elsewhere:6379/0"
    assert consumer.observers == [observer]
    with pytest.raises(ConfigurationError, match="different Redis servers"):
        Consumer("redis://here:6379/0").include(other)


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        (
            "no_such_module_at_all",
            "cannot import 'no_such_module_at_all': No module named 'no_such_module_at_all' in this",
        ),
        ("no_such.module", "cannot import 'no_such.module': No module named 'no_such' in this folder"),
        (
            "./shop_billing:consumer",
            "a module is named like shop.jobs, not './shop_billing'; write shop_billing:consumer",
        ),
        ("shop/jobs.py:c", r"not 'shop/jobs.py'; write shop.jobs:c"),
        ("shop/jobs.py", r"not 'shop/jobs.py'; write shop.jobs"),
        (":consumer", "a module is named like shop.jobs, not ''"),
        ("shop_billing:jobs", r"a Consumer named 'jobs'; it has: consumer \(write shop_billing:consumer\)"),
        ("json:jobs", "a Consumer named 'jobs'; it has none$"),
        ("json", "exactly one Consumer; it has none$"),
        ("two_consumers", r"exactly one Consumer; it has: mails, orders \(write two_consumers:mails\)"),
    ],
)
def test_a_consumer_that_is_not_there_is_named(billing, monkeypatch, place, complaint):
    two = types.ModuleType("two_consumers")
    two.mails, two.orders = Consumer(), Consumer()
    monkeypatch.setitem(sys.modules, "two_consumers", two)

    with pytest.raises(ConfigurationError, match=complaint):
        load_consumer(place)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import requestsss", r"No module named 'requestsss', which .*broken_app.py:1 imports; install it for "),
        ("import broken_lib", r"No module named 'requestsss', which .*broken_lib.py:2 imports; install it for "),
        ("import circle_a", r"a circular import at .*circle_b.py:1: cannot import name 'A' from partially initialized"),
        ("from json import nothing", r"cannot import name 'nothing' from 'json' .*, at .*broken_app.py:1"),
    ],
)
def test_an_import_that_fails_within_the_application_is_told_by_file_line_and_what_is_missing(
    tmp_path, monkeypatch, source, said
):
    files = {
        "broken_app": source,
        "broken_lib": "\nimport requestsss",
        "circle_a": "from circle_b import B\nA = 1",
        "circle_b": "from circle_a import A\nB = 1",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigurationError, match=rf"cannot import 'broken_app': {said}"):
        load_consumer("broken_app:consumer")


@pytest.mark.parametrize(
    ("source", "said", "line"),
    [
        ("one = (", "SyntaxError: '(' was never closed", "broken_app.py"),
        ("import broken_lib", "ValueError: of the library", "broken_lib.py"),
        ("def f():\n    raise KeyError('five')\nf()", "KeyError: 'five'", "broken_app.py"),
    ],
)
def test_what_the_applications_module_raises_is_told_by_its_own_traceback(tmp_path, source, said, line):
    (tmp_path / "broken_app.py").write_text(source)
    (tmp_path / "broken_lib.py").write_text("raise ValueError('of the library')")
    command = [sys.executable, "-m", "reliq", "worker", "broken_app:consumer"]

    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)

    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, lines[-1]) == (2, "", said)
    assert lines[0] == f"reliq: cannot import 'broken_app': it raised {said.partition(':')[0]}"
    files = [one.split('"')[1] for one in lines if one.startswith("  File")]
    assert str(tmp_path / line) in files
    assert all(file.startswith(str(tmp_path)) for file in files)


def test_a_module_that_wants_django_to_be_set_up_first_is_told_so(tmp_path):
    models = (
        "from django.apps import apps\nfrom django.conf import settings\nsettings.configure()\napps.check_apps_ready()"
    )
    (tmp_path / "broken_app.py").write_text(models)
    command = [sys.executable, "-m", "reliq", "worker", "broken_app:consumer"]

    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)

    cure = "the worker's module must call django.setup() before it imports models"
    assert done.stderr.splitlines()[0] == (f"reliq: cannot import 'broken_app': it raised AppRegistryNotReady; {cure}")


def test_a_worker_of_a_consumer_without_handlers_ends_with_2(tmp_path, url):
    (tmp_path / "empty_app.py").write_text("from reliq import Consumer\nconsumer = Consumer()\n")
    command = [sys.executable, "-m", "reliq", "worker", "empty_app:consumer", "--url", url]

    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("reliq: this consumer has no handlers")


def test_a_handler_without_its_queue_is_refused():
    with pytest.raises(ConfigurationError, match=r"say which queue takes_a_body handles: @consumer.handler\(QUEUE\)"):
        Consumer().handler(takes_a_body)
    with pytest.raises(ConfigurationError, match="takes a Queue or the name of one, not int"):
        Consumer().handler(5)


class Animal:
    pass


@dataclass
class Cat(Animal):
    lives: int


@dataclass
class Invoice:
    number: int


class Mail(TypedDict):
    to: str


@pytest.mark.parametrize(
    ("kind", "annotated", "is_certain"),
    [
        (str, int, True),
        (bytes, str, True),
        (Cat, Invoice, True),
        (Cat, dict, True),
        (Cat, Animal, False),
        (Cat, object, False),
        (Cat, Any, False),
        (Cat, Cat | None, False),
        (int, float, False),
        (int, complex, False),
        (Mail, dict, False),
        (dict, Mail, False),
        (Mail, Mail, False),
        (list[int], list[str], False),
        (Cat, Hashable, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [None, 5])
def test_an_annotation_that_certainly_contradicts_the_queue_is_refused(kind, annotated, is_certain, batch):
    def handle(body): ...

    handle.__annotations__["body"] = annotated if batch is None else list[annotated]
    register = Consumer().handler(Queue("q", kind), batch=batch)
    if is_certain:
        with pytest.raises(ConfigurationError, match=r"handle: 'body' is annotated as .*, and queue 'q' has bodies of"):
            register(handle)
    else:
        register(handle)


def generator():
    yield


async def agenerator():
    yield


@contextmanager
def life():
    yield


@contextmanager
def life_of_two(first, second):
    yield


@pytest.mark.parametrize(
    ("lifespan", "complaint"),
    [
        (life(), r"lifespan must be the function, not what it returned: name it without \(\)"),
        (generator, "lifespan generator must be decorated with @contextmanager of contextlib"),
        (agenerator, "lifespan agenerator must be decorated with @asynccontextmanager"),
        (life_of_two, r"lifespan life_of_two must take \(\); it takes \(first, second\)"),
        (dict, "lifespan dict must return a context manager"),
        (5, "lifespan must be a function, not a int"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_lifespan_that_cannot_be_entered_is_refused_when_it_is_given(lifespan, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Consumer(lifespan=lifespan)


async def coroutine(job): ...


@pytest.mark.parametrize(
    ("around", "complaint"),
    [
        (life, r"middleware life must take \(job\); it takes \(\)"),
        (life_of_two, r"middleware life_of_two must take \(job\); it takes \(first, second\)"),
        (generator, "middleware generator must be decorated with @contextmanager"),
        (agenerator, "middleware agenerator must be decorated with @asynccontextmanager"),
        (coroutine, "middleware coroutine must return a context manager"),
        (Animal, "middleware Animal must return a context manager"),
        (life(), "middleware must be the function, not what it returned"),
        (None, "middleware must be a function, not a NoneType"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_middleware_that_cannot_be_entered_is_refused_when_it_is_registered(around, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Consumer().middleware(around)


def test_a_worker_is_not_run_in_a_thread_that_may_not_handle_signals(consumer, queue):
    consumer.handler(queue)(takes_a_body)
    with (
        ThreadPoolExecutor() as pool,
        pytest.raises(ConfigurationError, match=r"use consumer.start\(\) and consumer.stop"),
    ):
        pool.submit(consumer.run).result()


def test_a_consumer_needs_handlers_known_queues_and_one_server(url):
    consumer = Consumer(url)
    with pytest.raises(ConfigurationError, match="no handlers"):
        consumer.start()

    consumer.handler(ORDERS)(takes_a_body)
    with pytest.raises(ConfigurationError, match="no handler for queue 'order'; there are: orders"):
        consumer.start(queues=["order"])

    consumer.handler(Queue("other", str, url="redis://elsewhere:6379/0"))(takes_a_body)
    with pytest.raises(ConfigurationError, match="different Redis servers"):
        consumer.start()


class EntersBothWays:
    """A context manager, blocking or async."""

    def __init__(self, job):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


class EntersAsync:
    """A context manager for coroutines alone."""

    def __init__(self, job):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


@asynccontextmanager
async def async_around(job):
    yield


@pytest.mark.parametrize("around", [async_around, EntersAsync])
def test_a_middleware_for_coroutines_alone_is_refused_around_a_plain_handler(make_queue, consumer, around):
    consumer.middleware(around)
    consumer.handler(make_queue("plain"))(handles)

    with pytest.raises(ConfigurationError, match=r"is an async context manager, and handler handles of queue 'plain'"):
        consumer.start()


@pytest.mark.parametrize("around", [async_around, EntersAsync, EntersBothWays])
def test_a_middleware_for_coroutines_goes_around_coroutines(make_queue, consumer, around):
    async def ahandles(body):
        return None

    consumer.middleware(around)
    consumer.handler(make_queue("async"))(ahandles)
    consumer.handler(make_queue("plain"))(handles)

    assert len(consumer.chosen(["async"])) == 1
    if around is EntersBothWays:
        assert len(consumer.chosen([])) == 2


def handles(body):
    pass
