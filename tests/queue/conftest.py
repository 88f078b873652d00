"""Fixtures of the `Queue` tests: a queue on the test's server, a proxy that loses replies, a separate server."""

import subprocess
from contextlib import ExitStack, closing

import pytest
from ports import free_port
from proxy import Proxy

from reliq import Queue
from reliq.redis.shards import Shards
from reliq.testing.server import EmbeddedRedis


@pytest.fixture
def make_queue(url):
    """Make a queue, by default on the test's server; close it at the end of the test."""
    with ExitStack() as stack:

        def make(body=dict, **options):
            queue = Queue("q", body, **{"url": url} | options)
            stack.callback(queue.close)
            return queue

        yield make


@pytest.fixture
def queue(make_queue):
    return make_queue()


@pytest.fixture
def through(proxy, make_queue):
    """The queue, connected through the proxy."""
    return make_queue(url=proxy.url)


@pytest.fixture
def commands(client):
    """Return how often Redis ran each command since the test began, without a connection's setup commands."""
    greetings = {"info", "ping", "config", "config|resetstat", "client", "client|setinfo", "hello", "select"}
    client.config_resetstat()

    def look():
        ran = {name.removeprefix("cmdstat_"): row["calls"] for name, row in client.info("commandstats").items()}
        return {name: calls for name, calls in ran.items() if name not in greetings}

    return look


@pytest.fixture
def proxy(url, redis_server):
    with closing(Proxy(redis_server.port)) as proxy:
        yield proxy


@pytest.fixture
def away(url, redis_server):
    """Return the URL of an unreachable Redis, and a function that starts this Redis."""
    port = free_port()
    with ExitStack() as stack:
        yield f"redis://127.0.0.1:{port}/0", lambda: stack.enter_context(closing(Proxy(redis_server.port, port)))


@pytest.fixture
def persistent(monkeypatch):
    """Retry calls for a minute, not for two seconds, because the machine of the tests may be slow."""

    async def read(shards, driver, _for_seconds, read=Shards._read_or_stay):
        await read(shards, driver, 60.0)  # the first read of a map

    monkeypatch.setattr(Shards, "_read_or_stay", read)
    for module in ("queue", "publish"):
        monkeypatch.setattr(f"reliq.{module}.PUBLISH_SECONDS", 60.0)


@pytest.fixture
def own_server(redis_server):
    """Start servers for tests that stop, limit or fill them."""
    with ExitStack() as stack:

        def start(port=None, **options):
            names = {name.replace("_", "-"): str(value) for name, value in options.items()}
            return stack.enter_context(
                EmbeddedRedis(server=redis_server._server, port=port or free_port(), options=names)
            )

        yield start


@pytest.fixture
def certificates(tmp_path):
    """Create a key and a certificate for 127.0.0.1."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate
