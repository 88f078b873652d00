"""A consumer rejects invalid handlers at registration, before it runs."""

import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest

import reliq
from reliq import Consumer, Job, Queue
from reliq.consumer import load_consumer, traceback_of_module
from reliq.errors import ConfigurationError

ORDERS = Queue("orders", str)


def takes_a_body(body): ...
def takes_nothing(): ...
def takes_three(body, job, more): ...
def needs_a_keyword(body, *, database): ...
def takes_a_wrong_second(body, count: int): ...
def takes_a_job_first(job: Job, body: str): ...
def jobs_first(jobs: list[Job[str]]): ...
def one_body(body: str): ...
def one_job(bodies: list[str], job: Job[str]): ...
def yields(body):
    yield body


class Callable:
    async def __call__(self, body): ...


def test_a_function_of_another_signature_is_refused():
    for function, complaint in (
        (takes_nothing, "takes_nothing must take a body and optionally a job; it takes nothing"),
        (needs_a_keyword, "it takes body, database"),
        (takes_a_wrong_second, "annotate 'count' as Job"),
        (takes_a_job_first, "the first parameter must be the body and the second the Job, but 'job' comes first"),
        (yields, "must return its result, not yield it"),
        ("text", "must be a function, not a str"),
        (dict, "signature"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().handler(ORDERS)(function)
    for function, complaint in (
        (jobs_first, "'jobs' comes first"),
        (one_body, r"annotate 'body' as list\[\.\.\.\]"),
        (one_job, r"annotate 'job' as list\[Job"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().handler(ORDERS, batch=5)(function)


def test_the_signature_of_a_handler_decides_its_arguments():
    def optional_job(body: str, job: Job[str] | None = None) -> None: ...
    def job_by_default(body: str, job: Job[str] = None) -> None: ...

    for function, takes_job, is_async in (
        (lambda body: None, False, False),
        (lambda body, job: None, True, False),
        (lambda body, retries=3: None, False, False),
        (partial(takes_three, more=1), True, False),
        (Callable(), False, True),
        (optional_job, False, False),
        (job_by_default, True, False),
    ):
        consumer = Consumer()
        assert consumer.handler(ORDERS)(function) is function
        (handler,) = consumer.handlers
        assert (handler.takes_job, handler.is_async) == (takes_job, is_async), function


def test_an_untyped_queue_takes_its_type_from_the_annotation():
    def handle(body: list[int]) -> None: ...

    consumer = Consumer()
    consumer.handler("numbers")(handle)
    consumer.handler("batches", batch=10)(handle)

    assert consumer.handlers[0].codec.decode(b"[1, 2]") == [1, 2]
    assert consumer.handlers[1].codec.kind is int


def test_a_handler_without_a_queue_of_its_own_or_with_a_bad_setting_is_refused():
    consumer = Consumer()
    consumer.handler(ORDERS)(takes_a_body)

    with pytest.raises(ConfigurationError, match=r"queue 'orders' has two handlers: .*takes_a_body and .*takes_a_body"):
        consumer.handler("orders")(takes_a_body)
    with pytest.raises(
        ConfigurationError, match=r"handler takes_a_body has no queue; write @consumer.handler\(QUEUE\)"
    ):
        consumer.handler(takes_a_body)
    with pytest.raises(ConfigurationError, match="takes a Queue or the name of a queue, not int"):
        consumer.handler(5)
    for options, complaint in (
        ({"lease": 0.01}, "lease must be 0.05 to 86400 seconds, not 0.01"),
        ({"batch": 10, "linger": 61}, "linger must be 0 to 60 seconds, not 61"),
        ({"linger": 1}, "linger is for batches"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            consumer.handler("other", **options)


@pytest.fixture
def billing(monkeypatch):
    module = types.ModuleType("shop_billing")
    module.consumer = Consumer()
    module.consumer.handler("invoices")(takes_a_body)
    module.consumer.middleware(takes_a_body)
    monkeypatch.setitem(sys.modules, "shop_billing", module)
    return module


def test_a_consumer_includes_others_by_value_and_by_name_or_changes_nothing(billing):
    observer = [].append
    shipping = Consumer("redis://elsewhere:6379/0", observers=[observer])
    shipping.handler("parcels")(takes_a_body)

    consumer = Consumer().include("shop_billing", shipping)

    assert [handler.queue.name for handler in consumer.handlers] == ["invoices", "parcels"]
    assert (consumer.target, consumer.observers) == ("redis://elsewhere:6379/0", [observer])
    assert load_consumer("shop_billing:consumer") is billing.consumer
    with pytest.raises(ConfigurationError, match="different Redis servers"):
        Consumer("redis://here:6379/0").include(shipping)
    with pytest.raises(ConfigurationError, match="lifespan"):
        Consumer().include(Consumer(lifespan=lambda: None))  # the worker would never enter it
    own = Consumer()
    own.handler("invoices")(takes_a_body)
    with pytest.raises(ConfigurationError, match="two handlers"):
        own.include(consumer)
    assert [handler.queue.name for handler in own.handlers] == ["invoices"]


def test_a_consumer_that_cannot_be_found_is_named(billing, monkeypatch):
    two = types.ModuleType("two_consumers")
    two.mails, two.orders = Consumer(), Consumer()
    monkeypatch.setitem(sys.modules, "two_consumers", two)

    for place, complaint in (
        ("no_such.module", "cannot import 'no_such.module': No module named 'no_such' in this folder"),
        ("./shop_billing:consumer", "is named like shop.jobs, not './shop_billing'; write shop_billing:consumer"),
        ("shop/jobs.py:c", r"not 'shop/jobs.py'; write shop.jobs:c"),
        ("shop_billing:jobs", r"a Consumer named 'jobs'; it has: consumer \(write shop_billing:consumer\)"),
        ("json:jobs", "a Consumer named 'jobs'; it has none$"),
        ("two_consumers", r"exactly one Consumer; it has: mails, orders \(write two_consumers:mails\)"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            load_consumer(place)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import broken_lib", r"No module named 'requestsss', which .*broken_lib.py:2 imports"),
        ("import circle_a", r"a circular import at .*circle_b.py:1: cannot import name 'A' f"),
        ("from json import no", r"cannot import name 'no' from 'json' .*, at .*broken_app.py:1"),
    ],
    ids=["module", "circle", "name"],
)
def test_a_failed_import_of_the_application_names_file_line_and_module(tmp_path, monkeypatch, source, said):
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


CANNOT = "cannot import 'broken_app': it raised"
#: Broken application module -> the beginning of the worker's first line, and of its last line.
BROKEN = {
    "handlers": ("from reliq import Consumer\nconsumer = Consumer()", "this consumer has no handlers", ""),
    "syntax": ("one = (", f"{CANNOT} SyntaxError", "SyntaxError: '(' was never closed"),
    "library": ("import broken_lib", f"{CANNOT} ValueError", "ValueError: of the library"),
    "django": (
        "from django.apps import apps\nfrom django.conf import settings\nsettings.configure()\napps.check_apps_ready()",
        f"{CANNOT} AppRegistryNotReady; the worker's module must call django.setup() before it imports models",
        "",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_of_the_application_ends_its_worker_with_its_own_traceback(tmp_path, name):
    source, first, last = BROKEN[name]
    (tmp_path / "broken_app.py").write_text(source)
    (tmp_path / "broken_lib.py").write_text("raise ValueError('of the library')")
    command = [sys.executable, "-m", "reliq", "worker", "broken_app:consumer"]

    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60)

    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert lines[0].startswith(f"reliq: {first}")
    assert lines[-1].startswith(last)
    files = [one.split('"')[1] for one in lines if one.startswith("  File")]
    raising = {"handlers": [], "library": ["broken_lib.py"]}.get(name, ["broken_app.py"])
    assert {str(tmp_path / file) for file in raising} <= set(files)
    assert name == "django" or all(file.startswith(str(tmp_path)) for file in files)


def test_the_traceback_of_a_module_installed_beside_reliq_is_complete():
    ours = Path(reliq.__file__).parent
    sources = {str(ours / "inner.py"): "run()", str(ours.parent / "shop.py"): "raise ValueError('of the shop')"}
    inner, shop = (compile(source, file, "exec") for file, source in sources.items())

    with pytest.raises(ValueError, match="of the shop") as caught:
        exec(inner, {"run": lambda: exec(shop)})

    text = "\n".join(traceback_of_module(caught.value))
    assert [file in text for file in sources] == [False, True]


class Animal:
    pass


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


async def coroutine(job): ...


def test_a_lifespan_middleware_or_hook_that_cannot_be_called_is_refused():
    for lifespan, complaint in (
        (life(), r"lifespan must be the function, not its result: write it without \(\)"),
        (generator, "lifespan generator must be decorated with @contextmanager of contextlib"),
        (agenerator, "lifespan agenerator must be decorated with @asynccontextmanager"),
        (life_of_two, r"lifespan life_of_two must take \(\); it takes \(first, second\)"),
        (dict, "lifespan dict must return a context manager"),
        (5, "lifespan must be a function, not a int"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer(lifespan=lifespan)
    for around, complaint in (
        (life, r"middleware life must take \(job\); it takes \(\)"),
        (coroutine, "middleware coroutine must return a context manager"),
        (Animal, "middleware Animal must return a context manager"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().middleware(around)
    for hook, complaint in (
        (coroutine, "on_error coroutine must be a plain function, not async def"),
        (life_of_two, r"on_error life_of_two must take \(job, error, final\); it takes \(first, second\)"),
        ("text", "must be a function, not a str"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            Consumer().on_error(hook)


def test_a_worker_is_not_run_in_a_thread_that_may_not_handle_signals(consumer, queue):
    consumer.handler(queue)(takes_a_body)
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(consumer.run).exception()
    assert isinstance(refused, ConfigurationError)
    assert "use consumer.start() and consumer.stop" in str(refused)


def test_a_consumer_needs_handlers_known_queues_and_one_server(url):
    consumer = Consumer(url)
    with pytest.raises(ConfigurationError, match="no handlers"):
        consumer.start()

    consumer.handler(ORDERS)(takes_a_body)
    with pytest.raises(ConfigurationError, match="no handler for queue 'order'; queues with a handler: orders"):
        consumer.start(queues=["order"])

    consumer.handler(Queue("other", str, url="redis://elsewhere:6379/0"))(takes_a_body)
    with pytest.raises(ConfigurationError, match="different Redis servers"):
        consumer.start()


class EntersAsync(AbstractAsyncContextManager):
    """An async context manager."""

    def __init__(self, job):
        pass

    async def __aexit__(self, *_):
        return None


class EntersBothWays(EntersAsync, AbstractContextManager):
    """A context manager, blocking or async."""

    def __exit__(self, *_):
        return None


@asynccontextmanager
async def async_around(job):
    yield


@pytest.mark.parametrize("around", [async_around, EntersAsync, EntersBothWays], ids=lambda one: one.__name__)
def test_middleware_for_coroutines_alone_is_refused_around_plain_handlers(make_queue, consumer, around):
    consumer.middleware(around)
    consumer.handler(make_queue("async"))(coroutine)
    consumer.handler(make_queue("plain"))(takes_a_body)

    assert len(consumer.chosen(["async"])) == 1
    if around is EntersBothWays:
        assert len(consumer.chosen([])) == 2
    else:
        with pytest.raises(ConfigurationError, match="async context manager, and handler takes_a_body of queue 'p"):
            consumer.start()
