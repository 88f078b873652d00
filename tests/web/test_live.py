"""Streams: one look a second whoever watches, the newest alone for who is slow, and Redis may be away."""

import asyncio
import itertools
from contextlib import AsyncExitStack

import pytest
from anyio import to_thread
from listener import Listener
from ports import free_port
from site_page import site_of
from streams import events_of, viewing
from waiting import eventually

from reliq import Admin, Layout, Queue, RedisUnavailableError
from reliq.admin import session
from reliq.testing.server import EmbeddedRedis
from reliq.web import live, site as web_site
from reliq.web.application import in_thread
from reliq.web.live import EVENTS_LIMIT, Live, Part
from reliq.web.pages import LIVE
from reliq.web.site import LastSample

pytestmark = pytest.mark.slow
PART = Part("queues", "", "", "")
VIEWERS = 50


def looks_at_redis(client):
    """How many scripts Redis has run: each look at one queue runs one."""
    return client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]


def test_fifty_viewers_share_each_look_and_the_last_to_leave_ends_them(orders, site, client):
    site.program().get("/")  # the script is known from here on
    live, before, first = site.shared.live, looks_at_redis(client), site.shared.live.number

    async def watch():
        async with AsyncExitStack() as stack:
            viewers = [await stack.enter_async_context(viewing(site, "/stream?page=queues")) for _ in range(VIEWERS)]
            events = await asyncio.gather(*(viewer.until(lambda one: one.number >= first + 2) for viewer in viewers))
            return events, live.viewers

    events, viewers = asyncio.run(watch())
    eventually(lambda: not live.is_looking, "the last look ends when the last viewer has left")

    assert viewers == VIEWERS
    assert len({(event.number, event.data) for event in events}) == len({event.number for event in events})
    assert 1 <= looks_at_redis(client) - before <= live.number - first + 1


def test_pages_requested_at_once_share_a_look(orders, site, client, monkeypatch):
    monkeypatch.setattr(web_site, "FRESH_SECONDS", 3600)
    program = site.program()
    program.get("/")
    before = looks_at_redis(client)
    for _ in range(20):
        program.get("/")

    assert looks_at_redis(client) == before


def test_stream_shows_a_queue_of_another_layout(url, site):
    Queue("legacy", bytes, url=url, layout=Layout.hdt3213()).publish(b"x")

    [event] = events_of(site, "/stream?page=queue&queue=legacy&layout=hdt3213", 1)

    assert "legacy" in event.data


@pytest.mark.parametrize(("old_after", "arrived"), [(3600, True), (-1, False)], ids=["recent", "old"])
def test_rates_count_from_the_last_look_unless_it_is_old(orders, admin, monkeypatch, old_after, arrived):
    monkeypatch.setattr(web_site, "OLD_LOOK_SECONDS", old_after)
    last = LastSample(admin)
    last.get()
    orders.publish_many([{"n": 1}] * 7)
    last.forget()

    [view] = last.get().overview.queues
    assert bool(view.rates and view.rates.arrived) == arrived


def test_viewer_who_leaves_leaves_no_task(orders, site):
    before = site.tasks()

    async def come_and_go():
        async with viewing(site, "/stream?page=queue&queue=orders") as viewer:
            await viewer.event()
            return site.tasks() - before

    assert len(asyncio.run(come_and_go())) >= 2
    eventually(lambda: site.tasks() <= before and not site.shared.live.viewers, "its tasks have ended")


def test_slow_viewer_of_failing_looks_gets_the_newest_alone_until_its_stream_ends(caplog):
    """A stream ends so that the browser asks for access again."""
    numbers = itertools.count(1)

    def render(parts):
        number = next(numbers)
        if number == 2:
            raise RuntimeError("a secret")
        return dict.fromkeys(parts, f"look {number}")

    async def watch():
        live = Live(render, 0)
        live.join(PART)
        events = live.events(PART)
        seen = [await anext(events) for _ in range(3)]
        slow = live.number + 3
        while live.number < slow:  # noqa: ASYNC110  what passes is looks, not time
            await asyncio.sleep(0)
        seen += [event async for event in events]
        live.leave(PART)
        assert not live.is_looking
        return seen, slow

    (again, first, failed, later, *others), slow = asyncio.run(watch())

    assert again == "retry: 2000\n\n"
    assert "look 1\n" in first
    assert failed.startswith("event: away")
    assert "secret" not in failed
    assert "a secret" in caplog.text
    assert int(later.split("look ")[1].split()[0]) > slow
    assert len(others) == EVENTS_LIMIT - 3


def test_pages_and_streams_report_an_outage_of_redis_and_recover(server_path, monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.2)

    async def watch():
        async with viewing(site, "/stream?page=queues") as viewer:
            before = await viewer.until(lambda one: one.kind == "message")
            await asyncio.to_thread(server.kill)
            away = await viewer.until(lambda one: one.kind == "away")
            page = await asyncio.to_thread(program.get, "/queues/orders")
            form = await asyncio.to_thread(program.post, "/queues/orders/pause")
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(queue.publish, "y")
            after = await viewer.until(lambda one: one.kind == "message")
            return before, away, page, form, after

    with EmbeddedRedis(server=server_path, port=free_port()) as server, site_of(server.url) as site:
        queue, program = Queue("orders", str, url=server.url), site.program()
        queue.publish("x")
        before, away, page, form, after = asyncio.run(watch())
        queue.close()
        assert program.get("/queues/orders").status_code == 200

    assert "orders" in before.data
    assert "orders" not in away.data
    assert (page.status_code, form.status_code) == (503, 503)
    assert "Redis does not answer" in page.text
    assert 'http-equiv="refresh"' in page.text
    assert "orders" in after.data


class HangsUp(Listener):
    def _serve(self, peer, _number):
        peer.close()


def test_pages_that_wait_in_an_outage_do_not_all_try_redis_again(monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(web_site, "FRESH_SECONDS", 3600)
    listener = HangsUp()
    last = LastSample(Admin(listener.url))
    tries = []
    for _ in range(2):
        with pytest.raises(RedisUnavailableError):
            last.get()
        tries.append(listener.connections)
    listener.close()

    assert tries[0] == tries[1] > 0


def test_part_that_redis_refuses_or_that_fails_harms_no_other(orders, client, admin, url, monkeypatch, caplog):
    Queue("third", str, url=url).publish("x")
    rule = admin.acl(["viewer"], ["orders"], user="looks")
    client.execute_command("ACL", "SETUSER", "looks", "reset", *rule.rules, "on", ">secret")
    monkeypatch.setitem(LIVE, "workers", lambda context, now: 1 / 0)

    async def watch(site):
        async with AsyncExitStack() as stack:
            for part in ("queue&queue=third", "workers", "worker&id=none", "queue&queue=orders"):
                viewer = await stack.enter_async_context(viewing(site, f"/stream?page={part}"))
            return [await viewer.event() for _ in range(2)]

    try:
        with site_of(url.replace("redis://", "redis://looks:secret@")) as site:
            events = asyncio.run(watch(site))
    finally:
        client.acl_deluser("looks")

    assert {event.kind for event in events} == {"message"}
    assert "the live part of the page workers failed" in caplog.text


def test_parts_and_viewers_are_bounded(orders, site, monkeypatch):
    monkeypatch.setattr(live, "PARTS_LIMIT", 2)
    monkeypatch.setattr(live, "VIEWERS_LIMIT", 3)
    program = site.program()

    async def watch():
        async with AsyncExitStack() as stack:
            for page in ("queues", "workers", "workers"):
                before = [status_of(page) for page in ("queues", "account", "worker")]
                await stack.enter_async_context(viewing(site, f"/stream?page={page}"))
            return before, status_of("queues")

    def status_of(page):
        with program.stream("GET", f"/stream?page={page}") as answer:
            return answer.status_code

    (known, unknown, new), full = asyncio.run(watch())

    assert (known, unknown, new, full) == (200, 404, 429, 429)
    assert program.head("/stream?page=queues").status_code == 405


def test_pages_leave_the_threads_of_their_host_application_alone(orders, url):
    async def ask():
        with site_of(url) as site:
            host = to_thread.current_default_thread_limiter()
            seen = await in_thread(lambda: host.borrowed_tokens)
            return seen, site.program().get("/").status_code

    assert asyncio.run(ask()) == (0, 200)
