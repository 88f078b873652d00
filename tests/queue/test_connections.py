"""The accepted connections of a queue, and the first checks of a server."""

import asyncio
import gc
import pickle
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import redis.asyncio
from listener import Listener
from ports import free_port
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from required import must_run_in_ci
from transition import run_transition
from waiting import eventually

from reliq import Admin, ConfigurationError, Consumer, Layout, LoginError, Queue, RedisUnavailableError
from reliq.redis import commands
from reliq.redis.client import AnyClient, Client
from reliq.redis.cluster import Exchange
from reliq.redis.connection import Blocking, ServerConnections
from reliq.redis.server import Connection
from reliq.testing.server import EmbeddedRedis

DEBIAN = Path("/usr/bin/redis-server")


def works(queue, call):
    """Publish, count and receive."""
    receipt = call(queue, "publish", {"a": 1}, headers={"b": "c"})
    assert call(queue, "counts").ready == 1
    with queue.receive() as [job]:
        assert (job.id, job.body, job.headers) == (receipt.id, {"a": 1}, {"b": "c"})
    assert call(queue, "counts").totals["acked"] == 1
    assert call(queue, "dead_letters") == []
    queue.close()
    return True


def test_socket_protocol_and_timeouts_of_a_url_work(redis_server, url, call):
    assert works(Queue("q", url=f"unix://{redis_server.socket}?db=1"), call)
    assert works(Queue("q", url=f"{url}?protocol=3&socket_timeout=0.000001&max_connections=2"), call)


def test_bad_option_of_a_url_is_refused_by_name(url):
    with pytest.raises(ConfigurationError, match="Invalid value for 'max_connections'"):
        Queue("q", url=f"{url}?max_connections=many").publish({})


def test_client_with_text_replies_and_retries_works_unchanged(url, call, proxy):
    theirs = redis.Redis.from_url(proxy.url, decode_responses=True, retry=Retry(ExponentialBackoff(), 10), protocol=3)
    theirs.set("theirs", "ü")
    before = dict(theirs.connection_pool.connection_kwargs)
    queue = Queue("q", url=theirs)

    assert works(queue, call)

    assert theirs.get("theirs") == "ü"
    assert theirs.connection_pool.connection_kwargs == before
    assert theirs.get_retry().get_retries() == 10
    theirs.close()


def test_retries_of_a_client_do_not_repeat_a_script(proxy, call, commands, make_queue):
    theirs = redis.Redis.from_url(proxy.url, retry=Retry(ExponentialBackoff(), 10))
    queue = make_queue(url=theirs)
    call(queue, "publish", {})
    before = commands()["evalsha"]
    assert proxy.connections == 1
    proxy.lose_reply_to("EVALSHA")

    call(queue, "publish", {})

    assert commands()["evalsha"] == before + 2
    assert queue.counts().totals["published"] == 2
    theirs.close()


def test_client_for_asyncio_works(url, call):
    theirs = redis.asyncio.Redis.from_url(url)

    assert works(Queue("q", url=theirs), call)


class Refusing(Listener):
    """A server that closes each connection."""

    def _serve(self, peer, _number):
        peer.close()


def test_call_connects_once():
    with closing(Refusing()) as listener, pytest.raises(RedisUnavailableError):
        run_transition(Queue("q", url=listener.url), "counts")

    assert listener.connections == 1


def test_queues_of_a_url_share_a_pool(proxy):
    queues = [Queue(f"q{n}", url=proxy.url) for n in range(10)]

    for queue in queues:
        queue.publish({})

    assert proxy.connections == 1
    assert Connection.to(proxy.url) is Connection.to(proxy.url)
    queues[0].close()
    assert queues[0].publish({}).status == "published"
    assert proxy.connections == 2
    queues[0].close()


@pytest.mark.usefixtures("persistent")
def test_threads_share_a_bounded_pool(proxy, make_queue):
    queue = make_queue(url=f"{proxy.url}?max_connections=3")

    with ThreadPoolExecutor(10) as pool:
        for _ in range(200):
            pool.submit(queue.publish, {})

    assert queue.counts().totals["published"] == 200
    assert proxy.connections <= 3


@pytest.fixture
def tls_options(certificates):
    """Return port, certificate authority and options for Debian's redis-server with TLS only; embedded has no TLS."""
    linked = subprocess.run(["ldd", str(DEBIAN)], capture_output=True, check=False).stdout if DEBIAN.exists() else b""
    if b"libssl" not in linked:
        must_run_in_ci("there is no redis-server that is built with TLS (Debian: apt-get install redis-server)")
    key, certificate = certificates
    port = free_port()
    options = {"tls-port": str(port), "tls-cert-file": str(certificate), "tls-key-file": str(key)}
    return port, certificate, options | {"tls-ca-cert-file": str(certificate), "tls-auth-clients": "no"}


@pytest.fixture
def tls(tls_options):
    port, certificate, options = tls_options
    with EmbeddedRedis(server=DEBIAN, options=options | {"requirepass": ""}):
        yield port, certificate


def test_tls_works_in_a_cluster(tls_options, make_queue):
    port, authority, options = tls_options
    options |= {"cluster-enabled": "yes", "tls-cluster": "yes"}
    with EmbeddedRedis(server=DEBIAN, options=options) as node, redis.Redis(unix_socket_path=str(node.socket)) as admin:
        admin.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        eventually(lambda: admin.cluster("info")["cluster_state"] == "ok", "the cluster is well")

        queue = make_queue(url=f"rediss+cluster://127.0.0.1:{port}?ssl_ca_certs={authority}")
        assert queue.publish({}).status == "published"
        assert asyncio.run(queue.apublish({})).status == "published"
        with pytest.raises(RedisUnavailableError, match="if the port uses TLS, begin the URL with rediss"):
            run_transition(Queue("q", url=f"redis+cluster://127.0.0.1:{port}"), "counts")


def test_tls_works_with_the_settings_of_a_client(tls, call):
    port, authority = tls
    theirs = redis.Redis(port=port, ssl=True, ssl_ca_certs=str(authority))

    assert works(Queue("q", url=theirs), call)
    theirs.close()


def test_password_is_used_and_never_shown(own_server, call):
    server = own_server()
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", "s3cret")
    place = server.url.removeprefix("redis://")
    with pytest.raises(LoginError, match="Authentication required"):
        Queue("q", url=server.url).counts()

    assert works(Queue("q", url=f"redis://:s3cret@{place}"), call)
    with pytest.raises(Exception, match="Redis refused this user, password or database") as caught:
        call(Queue("q", url=f"redis://:wr0ng@{place}"), "publish", {})

    assert isinstance(caught.value.__cause__, LoginError)
    for text in (str(caught.value), str(pickle.loads(pickle.dumps(caught.value)))):
        assert ("RELIQ_URL, as redis://:PASSWORD@host" in text, "published again" in text) == (True, False)
    assert "wr0ng" not in str(caught.value)
    assert "wr0ng" not in str(caught.value.__cause__)
    assert "s3cret" not in Connection.to(f"redis://:s3cret@{place}").name


@pytest.mark.parametrize(
    "place",
    ["redis://:nobody-asked@{}/0", "redis://nobody:x@{}/0", "redis://{}/99"],
    ids=["password", "user", "database"],
)
def test_refused_login_raises_login_error(url, call, place):
    queue = Queue("q", url=place.format(url.removeprefix("redis://").partition("/")[0]))

    with pytest.raises(LoginError, match="user, password or database"):
        call(queue, "counts")


def test_tls_to_a_plain_port_raises_a_clear_error(url):
    with pytest.raises(RedisUnavailableError, match="if the port does not use TLS, begin the URL with redis://"):
        run_transition(Queue("q", url=url.replace("redis://", "rediss://")), "counts")


@pytest.mark.usefixtures("impatient")
def test_plain_connection_to_a_tls_port_raises_a_clear_error(tls, call):
    port, _ = tls

    with pytest.raises(RedisUnavailableError, match="if the port uses TLS, begin the URL with rediss://"):
        call(Queue("q", url=f"redis://127.0.0.1:{port}/0"), "counts")


def test_layout_without_a_hash_tag_is_refused_in_a_cluster():
    url = "redis+cluster://127.0.0.1:1"
    for layout in map(Layout.parse, ("hdt3213", "hdt3213:prefix=shop", "hdt3213:tag,prefix=shop")):
        consumer = Consumer(url)
        consumer.handler(Queue("q", bytes, layout=layout))(lambda body: None)
        for call in (partial(Queue, "q", layout=layout, url=url), partial(Admin, url, layout=layout), consumer.start):
            with pytest.raises(
                ConfigurationError, match="so a Redis Cluster cannot have the queue; use the layout hdt3213:tag"
            ):
                call()


def test_wait_goes_to_the_server_of_its_command():
    servers = SimpleNamespace(server_of=lambda command: "b" if "#1" in command[1] else "a")
    there, here, wait = ("LLEN", "{reliq:q#1.5}:ready"), ("LLEN", "{reliq:q}:ready"), ("WAIT", 1, 100)

    shares = Exchange(servers, [here, wait, there, wait, here]).shares

    assert [[one.command for one in shares[server]] for server in "ab"] == [[here, wait, here], [there, wait]]


def test_consumer_accepts_the_clients_of_its_queues(url):
    client = redis.Redis.from_url(url)
    queue = Queue("q", url=client)
    consumer = Consumer()
    done = []
    consumer.handler(queue)(done.append)
    queue.publish({"a": 1})

    consumer.drain()

    assert done == [{"a": 1}]
    client.close()


def test_close_of_a_queue_that_never_connected_does_nothing(monkeypatch):
    monkeypatch.delenv("RELIQ_URL", raising=False)
    queue = Queue("q")

    queue.close()
    asyncio.run(queue.aclose())


def test_thread_takes_a_connection_given_back_while_it_finds_none_idle(url, monkeypatch):
    client = Client.to(Connection.to(f"{url}?max_connections=1"), 5.0)
    client.run(commands.server_ms())
    found_none, given_back = threading.Event(), threading.Event()
    replacement, receive = ServerConnections._replacement, ServerConnections.receive

    async def late_replacement(self, unusable):
        found_none.set()
        given_back.wait()
        return await replacement(self, unusable)

    async def late_receive(self, *args, **options):
        if not given_back.is_set():
            found_none.wait()
        return await receive(self, *args, **options)

    monkeypatch.setattr(ServerConnections, "_replacement", late_replacement)
    monkeypatch.setattr(ServerConnections, "receive", late_receive)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(client.run, commands.server_ms())
        second = threads.submit(client.run, commands.server_ms())  # one of both needs a new connection
        next(as_completed([first, second]))
        given_back.set()

    assert first.result()
    assert second.result()


def test_failure_of_a_call_whose_caller_was_cancelled_is_not_logged(url, monkeypatch):
    reported = []

    async def cancel_then_fail():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        begun, fail = asyncio.Event(), asyncio.Event()

        async def lost(self, commands):
            begun.set()
            await fail.wait()
            raise redis.ConnectionError("the connection was lost")

        monkeypatch.setattr(ServerConnections, "exchange", lost)
        caller = asyncio.create_task(AnyClient(Connection.to(url).async_wire(5.0)).run(commands.server_ms()))
        await begun.wait()
        [call] = asyncio.all_tasks() - {asyncio.current_task(), caller}
        caller.cancel()
        await asyncio.wait([caller])
        fail.set()
        await asyncio.wait([call])

    asyncio.run(cancel_then_fail())
    gc.collect()
    assert reported == []


def test_connection_that_another_thread_has_closed_is_replaced(url, monkeypatch):
    """When Sentinel names a new primary, redis-py closes the pool's connections, also one that was just handed out."""
    get, closed = Blocking.get_connection, []

    async def closed_at_first(driver, pool):
        opened = await get(driver, pool)
        if not closed:
            closed.append(opened)
            opened.disconnect()
        return opened

    monkeypatch.setattr(Blocking, "get_connection", closed_at_first)

    with closing(Connection.to(url).anew()) as connection:
        assert Client.to(connection, 5.0).run(commands.server_ms(), for_seconds=2.0)
    assert closed


@pytest.mark.parametrize(
    ("owner", "place", "error"),
    [
        (redis.Connection, "can_read", ValueError("file descriptor cannot be a negative integer (-1)")),
        (redis.Connection, "check_health", None),  # sending raises AttributeError
        (redis.Connection, "read_response", AttributeError("'NoneType' object has no attribute 'gets'")),
        (Blocking, "input_check", TypeError("argument must be an int, or have a fileno() method.")),
    ],
)
def test_close_in_another_thread_fails_no_call_that_is_retried(url, monkeypatch, owner, place, error):
    connection, closed = Connection.to(url).anew(), []
    run = Client.to(connection, 5.0).run
    run(commands.server_ms())  # check the server's version
    connection.close()
    real = getattr(owner, place)

    def closed_at_first(*args, **options):
        if not closed:
            closed.append(place)
            connection.close()
            if error:
                raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, place, closed_at_first)

    assert run(commands.server_ms(), for_seconds=2.0)
    assert closed
    connection.close()
    closed.clear()
    with pytest.raises(RedisUnavailableError, match="another thread closed the connection"):
        run(commands.server_ms())
    assert run(commands.server_ms())
