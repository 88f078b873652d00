"""Pages of periodic jobs: schedules, missed and skipped runs, and the actions run, pause and resume."""

import re

import pytest
from waiting import eventually

from reliq import Consumer, Queue, WorkerSettings


def cells(site):
    """Return the table of periodic jobs: name -> label -> text."""
    page = re.sub(r"<(?!td|/td|th|/th|/tr)[^>]*>", "", site.program().get("/periodic").text)
    rows = re.findall(r'<th scope="row">\s*(.*?)\s*</th>(.*?)</tr>', page, re.DOTALL)
    return {name: dict(re.findall(r'data-label="([^"]*)">\s*(.*?)\s*</td>', rest, re.DOTALL)) for name, rest in rows}


def test_every_periodic_job_has_a_row(orders, entry, site):
    assert "There is no periodic job" in site.program().get("/periodic").text
    site.app.last.forget()
    entry("daily", missed=2, paused=3, overlap=4, ticked=1_795_000_000, id="cron.daily.1795000000")
    entry("hourly", schedule="every 3600")

    found = cells(site)

    assert found.keys() == {"daily", "hourly"}
    counted = {name: found["daily"][name] for name in ("missed", "skipped paused", "skipped overlap", "schedule")}
    assert counted == {"missed": "2", "skipped paused": "3", "skipped overlap": "4", "schedule": "0 6 * * * UTC"}
    assert (found["hourly"]["last"], found["daily"]["last"].endswith(" ago")) == ("never", True)
    assert found["hourly"]["next"].startswith("in ")


@pytest.mark.parametrize(
    ("fields", "mark"),
    [
        ({}, None),
        ({"seen": 1}, "no worker has it"),
        ({"last": 1_700_000_000}, "its tick is .* late"),
        ({"schedule": "every <b>"}, "this version of reliq cannot read its schedule"),
        ({"pause": '{"by":"bob","at":1.0,"reason":"<b>we move</b>"}'}, "paused: &lt;b&gt;we move&lt;/b&gt;"),
    ],
    ids=["well", "unserved", "late", "unreadable", "paused"],
)
def test_periodic_job_is_marked_when_it_needs_attention(fields, mark, orders, entry, site):
    entry("daily", **fields)

    for path in ("/periodic", "/queues/orders/periodic?name=daily"):
        page = site.program().get(path).text
        assert re.search(mark or "$", page), path
        assert mark or 'class="mark bad"' not in page
        assert "<b>" not in page.partition("<main")[2]


def test_periodic_job_is_paused_and_resumed_with_the_right_to_write(orders, entry, client, site, lookers, caplog):
    caplog.set_level("INFO", "reliq")
    key = entry("daily")
    page, browser = "/queues/orders/periodic?name=daily", site.browser()

    assert "/run_cron" not in lookers.program().get(page).text
    assert lookers.browser().post("/queues/orders/pause_cron", data={"name": "daily"}).status_code == 403
    answer = browser.post("/queues/orders/pause_cron", data={"name": "daily", "reason": "we move"})
    assert answer.headers["location"] == "/queues/orders/periodic?name=daily&done=pause_cron"
    assert "by alice" in browser.get(page).text
    assert client.hexists(key, "daily pause")

    assert browser.post("/queues/orders/resume_cron", data={"name": "daily"}).status_code == 303

    assert not client.hexists(key, "daily pause")
    assert "web: alice at 127.0.0.1: pause_cron orders daily reason='we move'" in caplog.messages


def test_periodic_job_is_run_at_once_by_its_worker(url, admin, site, monkeypatch):
    monkeypatch.setattr("reliq.worker.upkeep.TICKER_SECONDS", 0.1)
    queue, consumer = Queue("orders", dict, url=url), Consumer(url)
    consumer.handler(queue)(lambda body: None)
    consumer.cron("0 6 * * *", queue=queue, body={"of": "a tick"}, name="daily")
    consumer.start(WorkerSettings(concurrency=1))
    try:
        eventually(lambda: [one.is_served for one in admin.crons()] == [True], "a worker has it")
        answer = site.browser().post("/queues/orders/run_cron", data={"name": "daily"})
        task = site.app.tasks[answer.headers["location"].rpartition("/")[2]]
        eventually(lambda: task.state != "running", "it is published", 60)
    finally:
        consumer.stop()

    assert (task.state, task.outcome.partition("cron.daily")[0]) == ("finished", "published ")
    assert task.outcome.removeprefix("published ") == admin.crons()[0].last_id
