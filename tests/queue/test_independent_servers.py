"""One queue over several Redis servers that know nothing of each other; each knows its place."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import redis
from typer.testing import CliRunner

from reliq import ConfigurationError, Consumer, Outgoing, PublishFailed, Queue
from reliq.cli.app import app
from reliq.cli.work import _use_url
from reliq.embedded import EmbeddedRedis
from reliq.ids import home
from reliq.keys import Keys, Layout
from reliq.transport.connection import Connection


@pytest.fixture(scope="module")
def started(server_path):
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedRedis(server=server_path)) for _ in range(3)]


@pytest.fixture
def urls(started):
    for one in started:
        with redis.Redis.from_url(one.url) as client:
            client.flushall()
    urls = [one.url for one in started]
    Connection.to(tuple(urls)).maps.clear()
    return urls


def lengths(urls):
    return [redis.Redis.from_url(url).llen(Keys("q", shard=at).ready) for at, url in enumerate(urls)]


def test_messages_are_spread_over_the_servers_and_are_one_queue(urls, call):
    queue = Queue("q", shards=urls)

    call(queue, "publish_many", [{}] * 30, chunk=1)
    assert call(queue, "publish_many", [Outgoing(body={}, id=f"order-{n}") for n in range(30)]).published == 30
    assert call(queue, "publish", {}, id="order-1").status == "duplicate"

    at_home = [sum(home(f"order-{n}", 3) == at for n in range(30)) for at in range(3)]
    assert lengths(urls) == [10 + there for there in at_home]
    assert call(queue, "counts").ready == 60
    assert call(queue, "cancel", "order-7") == "cancelled"


def test_each_server_knows_its_place_and_another_order_or_number_is_refused(urls, call):
    call(Queue("q", shards=urls), "publish", {})

    for named, told in (
        ([urls[1], urls[0], urls[2]], "is 2 of 3 servers of queue 'q' .epoch 1., and named as 1 of 3"),
        (urls[:2], "is 1 of 3 servers of queue 'q' .epoch 1., and named as 1 of 2"),
        ([*urls[1:], urls[0]], "is 2 of 3 servers"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            call(Queue("q", shards=named), "publish", {})


def test_a_start_that_was_cut_off_goes_on(urls):
    Queue("q", shards=urls).publish({})
    with redis.Redis.from_url(urls[2]) as client:
        client.delete(Keys("q").map)

    Queue("q", shards=tuple(urls)).shards()

    assert b'"place":3' in redis.Redis.from_url(urls[2]).get(Keys("q").map)


def test_commands_take_the_servers_in_their_order(urls):
    Queue("q", shards=urls).publish_many([{}] * 30, chunk=1)
    runner, servers = CliRunner(), " ".join(urls)

    shown = runner.invoke(app, ["shards", "q", "--json", "--url", servers])
    checked = runner.invoke(app, ["check", "q", "--url", servers])
    purged = runner.invoke(app, ["purge", "q", "--state", "ready", "--yes", "--url", servers])

    assert [one["ready"] for one in json.loads(shown.stdout)["counts"]] == [10, 10, 10]
    assert (checked.exit_code, purged.exit_code) == (0, 0), checked.output + purged.output
    assert lengths(urls) == [0, 0, 0]


def test_commands_take_the_servers_of_the_environment(urls, monkeypatch):
    Queue("q", shards=urls).publish_many([{}] * 30, chunk=1)
    monkeypatch.setenv("RELIQ_URL", " ".join(urls))

    shown = CliRunner().invoke(app, ["shards", "q", "--json"])

    assert [one["ready"] for one in json.loads(shown.stdout)["counts"]] == [10, 10, 10]


def test_a_program_names_the_servers_in_its_code(urls, monkeypatch):
    monkeypatch.setenv("RELIQ_URL", " ".join(urls))

    assert Queue("q", shards=urls).publish({})
    with pytest.raises(ConfigurationError, match=r"RELIQ_URL names several servers: .*name theirs in code, as Queue\("):
        Queue("q").publish({})
    with pytest.raises(ConfigurationError, match=r"--url names several servers: .*name theirs in code, as Queue\("):
        _use_url(Consumer(), " ".join(urls))


def test_a_queue_that_had_one_server_asks_there_first(urls):
    assert Queue("q", url=urls[0]).publish({}, id="order-1")
    queue = Queue("q", shards=urls)

    assert queue.publish({}, id="order-1").status == "duplicate"
    assert queue.known_shards.map.was == 1


def test_a_server_that_is_away_is_passed_by_with_generated_ids(urls, started):
    queue = Queue("q", shards=urls)
    queue.publish_many([{}] * 3, chunk=1)
    started[1].kill()
    try:
        assert all(queue.publish({}) for _ in range(6))
        with pytest.raises(PublishFailed):
            queue.publish({}, id=next(id for n in range(99) if home(id := f"order-{n}", 3) == 1))
    finally:
        started[1].start()


@pytest.mark.parametrize(
    ("shards", "options"),
    [
        (["redis://a"], {"url": "redis://b"}),
        ([1], {}),
        (["redis://a"], {"layout": Layout.hdt3213()}),
        ([], {}),
        ("8", {}),
    ],
)
def test_what_names_no_servers_is_refused(shards, options):
    with pytest.raises(ConfigurationError, match="shards"):
        Queue("q", shards=shards, **options)


def test_a_receive_takes_from_all_servers(urls):
    queue = Queue("q", shards=urls)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, queue, 9)
        queue.publish_many([{}] * 9, chunk=1)
        assert taken.result() == 9


def take(queue, number):
    done = 0
    while done < number:
        with queue.receive(limit=5, wait=5) as jobs:
            done += len(jobs)
    return done
