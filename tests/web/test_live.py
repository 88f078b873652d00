"""Live pages: however many are open, Redis is read once a second, and may be unreachable."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from anyio import to_thread
from listener import Listener
from ports import free_port
from site_page import site_of

from reliq import Admin, RedisUnavailableError
from reliq.redis import session
from reliq.testing.server import EmbeddedRedis
from reliq.web import pages
from reliq.web.application import in_thread
from reliq.web.pages import LastSample

pytestmark = pytest.mark.slow
VIEWERS = 50


def looks_at_redis(client):
    """Return the number of scripts that Redis has run: each read of a queue runs one script."""
    return client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]


@pytest.mark.parametrize(("fresh", "most"), [(3600, 0), (-1, VIEWERS)], ids=["one second", "another second"])
def test_pages_polled_at_once_share_a_look(fresh, most, orders, site, client, monkeypatch):
    program = site.program()
    program.get("/")  # loads the script
    monkeypatch.setattr(pages, "FRESH_SECONDS", fresh)
    before = looks_at_redis(client)
    with ThreadPoolExecutor(VIEWERS) as viewers:
        paths = ["/", "/queues/orders"] * (VIEWERS // 2)
        statuses = set(viewers.map(lambda path: program.get(path).status_code, paths))

    assert statuses == {200}
    assert looks_at_redis(client) - before == most


@pytest.mark.parametrize(("old_after", "arrived"), [(3600, True), (-1, False)], ids=["recent", "old"])
def test_rates_count_from_the_last_look_unless_it_is_old(orders, admin, monkeypatch, old_after, arrived):
    monkeypatch.setattr(pages, "OLD_SECONDS", old_after)
    last = LastSample(admin)
    last.get()
    orders.publish_many([{"n": 1}] * 7)
    last.forget()

    [view] = last.get()[0].overview.queues
    assert bool(view.rates and view.rates.arrived) == arrived


def test_pages_report_an_outage_of_redis_and_recover(server_path, monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(pages, "FRESH_SECONDS", -1)
    with EmbeddedRedis(server=server_path, port=free_port()) as server, site_of(server.url) as site:
        Admin(server.url).publish("orders", b"1")
        program = site.program()
        before = program.get("/queues/orders")
        server.kill()
        away = program.get("/queues/orders")
        form = program.post("/queues/orders/pause")
        server.start()
        after = program.get("/queues/none")

    assert (before.status_code, away.status_code, form.status_code, after.status_code) == (200, 503, 503, 404)
    assert "Redis does not answer" in away.text
    assert ['http-equiv="refresh"' in page.text for page in (away, form)] == [True, False]
    assert ["data-live" in page.text for page in (away, form)] == [True, False]


class HangsUp(Listener):
    def _serve(self, peer, _number):
        peer.close()


def test_pages_that_wait_in_an_outage_do_not_all_try_redis_again(monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(pages, "FRESH_SECONDS", 3600)
    listener = HangsUp()
    last = LastSample(Admin(listener.url))
    tries = []
    for _ in range(2):
        with pytest.raises(RedisUnavailableError):
            last.get()
        tries.append(listener.connections)
    listener.close()

    assert tries[0] == tries[1] > 0


def test_pages_leave_the_threads_of_their_host_application_alone(orders, url):
    async def ask():
        with site_of(url) as site:
            host = to_thread.current_default_thread_limiter()
            seen = await in_thread(lambda: host.borrowed_tokens)
            return seen, site.program().get("/").status_code

    assert asyncio.run(ask()) == (0, 200)
