"""`reliq cron` and the methods of Admin behind it: what ticks when, run, paused, resumed, forgotten."""

import asyncio
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner
from waiting import eventually

from reliq import Admin, ConfigurationError, Consumer, Queue
from reliq.admin import AsyncAdmin
from reliq.cli.app import app
from reliq.cli.screen import Screen
from reliq.client.client import Client
from reliq.transport.connection import Connection
from reliq.worker.ticker import Ticker


@pytest.fixture
def reports(url):
    return Queue("reports", dict, url=url)


@pytest.fixture
def ticker(url, reports):
    """The ticker of a process with two entries, started."""
    consumer = Consumer()
    consumer.cron("0 6 * * *", queue=reports, body={}, name="daily", tz="Europe/Berlin")
    consumer.every(3600, queue=reports, body={}, name="hourly", overlap="skip")
    # Connections of its own: an Admin that is closed closes those that a URL shares.
    one = Ticker(Client(Connection.to(url).anew().wire()), consumer.periodic)
    one.step()
    return one


@pytest.fixture
def ticking(ticker):
    """The ticker, at work until the test ends."""
    over = threading.Event()

    def work():
        while not over.is_set():
            ticker.step()
            over.wait(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    yield ticker
    over.set()
    thread.join()


@pytest.fixture
def reliq(url):
    """Run the command and return its output; it must end with this exit code."""

    def run(*words, code=0):
        done = CliRunner().invoke(app, [*words, "--url", url])
        if isinstance(done.exception, ConfigurationError):
            assert code == 2, done.exception
            return str(done.exception)
        assert done.exit_code == code, done.output
        return done.output

    return run


def gone(client, name):
    """Let the last process with an entry be silent for a minute."""
    client.hset("{reliq:reports}:cron", f"{name} seen", int(time.time()) - 60)


def test_a_list_says_when_each_entry_ticks_next_and_did_last(ticker, reliq, client):
    client.hset("{reliq:reports}:cron", mapping={"hourly ticked": int(time.time()) - 60, "hourly missed": 2})

    title, daily, hourly = reliq("cron", "list").splitlines()

    assert " ".join(title.split()) == "name queue schedule next last missed paused overlap last message"
    assert re.fullmatch(r"daily +reports +0 6 \* \* \* Europe/Berlin +in \S+ +never +0 +0 +0", daily)
    assert re.fullmatch(r"hourly +reports +every 3600 +in \S+ +1m\d*s? ago +2 +0 +0", hourly)


def test_without_entries_a_list_says_how_there_come_to_be_some(reliq, reports):
    reports.publish({})

    assert reliq("cron", "list", "reports").startswith("There is no periodic entry; @consumer.cron(…) makes one")
    assert json.loads(reliq("cron", "list", "--json")) == []


def test_a_list_says_of_each_entry_what_is_wrong(ticker, reliq, client):
    gone(client, "daily")
    client.hset("{reliq:reports}:cron", mapping={"hourly last": int(time.time()) - 7300, "spoilt schedule": "x"})
    reliq("cron", "pause", "hourly", "--reason", "the warehouse moves")

    said = reliq("cron", "list")

    assert "daily: no worker has it: none of them runs, or it is no more in the code" in said
    assert re.search(r"hourly: paused by \S+ \S+ ago: the warehouse moves", said)
    assert re.search(r"hourly: its tick is [12]h\d*m? late: the logs of its workers say why", said)
    assert "spoilt: its schedule cannot be read here" in said


def test_a_message_that_holds_up_its_entry_is_shown(ticking, url, reliq):
    Admin(url).run_cron("reports", "hourly")

    assert "(alive)" in reliq("cron", "list").splitlines()[2]


def test_a_run_is_published_by_a_worker_at_once_in_a_pause_too(ticking, reliq, reports):
    reliq("cron", "pause", "daily")

    said = reliq("cron", "run", "daily")

    assert re.fullmatch(r"published cron\.daily\.run\.\d{13} to reports\n", said)
    with reports.receive() as [job]:
        assert job.id == said.split()[1]
        assert job.headers["reliq-tick"].startswith("20")


def test_a_run_of_an_entry_that_no_worker_has_is_refused(ticker, reliq, client):
    gone(client, "daily")

    assert "no worker has the periodic entry 'daily' now" in reliq("cron", "run", "daily", code=2)


def test_a_run_that_no_worker_publishes_is_withdrawn(ticker, url, client):
    with pytest.raises(ConfigurationError, match="no worker has published the periodic entry 'daily' within 0.01 s"):
        Admin(url).run_cron("reports", "daily", wait=0.01)

    assert not client.hexists("{reliq:reports}:cron", "daily asked")


def test_a_run_that_is_asked_for_again_before_it_is_published_is_published_once(ticker, url, client, monkeypatch):
    client.hset("{reliq:reports}:cron", "daily asked", 1_800_000_000_000)
    waits = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: ticker.step())
    monkeypatch.setattr("reliq.admin.crons.time", waits)

    assert Admin(url).run_cron("reports", "daily") == "cron.daily.run.1800000000000"
    assert client.llen("{reliq:reports}:ready") == 1


def test_a_pause_ends_by_resume(ticker, reliq, url):
    assert reliq("cron", "pause", "daily") == "daily is paused; `reliq cron resume daily` ends it\n"
    assert Admin(url).crons()[0].pause is not None

    assert reliq("cron", "resume", "daily") == "daily is resumed\n"
    assert reliq("cron", "resume", "daily") == "daily was not paused\n"
    assert Admin(url).crons()[0].pause is None


def test_ticks_of_a_pause_without_any_worker_are_skipped_and_counted_by_resume(ticker, reliq, url, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.crons.TICKS_TOGETHER", 2)
    reliq("cron", "pause", "hourly")
    last = int(client.hget("{reliq:reports}:cron", "hourly last"))
    client.hset("{reliq:reports}:cron", "hourly last", last - 5 * 3600)

    reliq("cron", "resume", "hourly")
    ticker.step()

    [hourly] = [one for one in Admin(url).crons() if one.name == "hourly"]
    assert (hourly.skipped["paused"], hourly.missed, client.exists("{reliq:reports}:ready")) == (5, 0, 0)
    assert hourly.next == (last // 3600 + 1) * 3600


def test_an_entry_is_forgotten_when_no_worker_has_it(ticker, reliq, client, url):
    assert "take it out of the code" in reliq("cron", "forget", "daily", code=2)
    gone(client, "daily")

    assert reliq("cron", "forget", "daily") == "daily of reports is forgotten\n"

    assert [one.name for one in Admin(url).crons()] == ["hourly"]
    assert not [name for name in client.hkeys("{reliq:reports}:cron") if name.startswith(b"daily ")]


@pytest.mark.parametrize("verb", ["run", "pause", "resume", "forget"])
def test_an_unknown_entry_is_told_with_what_there_is(verb, ticker, reliq):
    assert "there is no periodic entry 'nope'; `reliq cron list`" in reliq("cron", verb, "nope", code=2)
    told = reliq("cron", verb, "nope", "--queue", "reports", code=2)
    assert told == "queue 'reports' has no periodic entry 'nope'; it has daily, hourly"


def test_of_two_entries_that_are_called_alike_one_is_named_by_its_queue(ticker, reliq, url):
    consumer = Consumer()
    consumer.every(5, queue=Queue("other", dict, url=url), body={}, name="daily")
    Ticker(Client(Connection.to(url).wire()), consumer.periodic).step()

    assert "called 'daily': other, reports; say which with --queue" in reliq("cron", "pause", "daily", code=2)
    assert reliq("cron", "pause", "daily", "--queue", "other").startswith("daily is paused")


@pytest.mark.parametrize("reason", ["two\nlines", "x" * 201])
def test_a_reason_that_is_no_line_is_refused(reason, ticker, reliq):
    assert "reason must be one line" in reliq("cron", "pause", "daily", "--reason", reason, code=2)


def test_every_answer_is_json_where_it_is_wanted(ticking, reliq, client):
    said = [json.loads(reliq("cron", *words, "--json")) for words in (["list"], ["run", "daily"], ["pause", "daily"])]
    said.append(json.loads(reliq("cron", "resume", "daily", "--json")))

    assert [one["name"] for one in said[0]] == ["daily", "hourly"]
    assert said[0][1]["schedule"] == "every 3600"
    assert said[1]["id"].startswith("cron.daily.run.")
    assert said[2:] == [{"paused": True, "queue": "reports"}, {"was_paused": True, "queue": "reports"}]


def test_async_code_has_the_same(ticking, url):
    async def program():
        admin = AsyncAdmin(url)
        try:
            id = await admin.run_cron("reports", "daily")
            await admin.pause_cron("reports", "daily")
            return id, [one.name for one in await admin.crons()], await admin.resume_cron("reports", "daily")
        finally:
            await admin.aclose()

    id, names, was_paused = asyncio.run(program())

    assert (id[:15], names, was_paused) == ("cron.daily.run.", ["daily", "hourly"], True)


def test_a_foreign_hash_hides_no_entry(ticker, url, client):
    foreign = {
        "": "x",
        "x": "y",
        " schedule": "z",
        "daily pause": b"\xff",
        "daily ticked": "9" * 18,
        b"\xff schedule": b"\xff",
    }
    client.hset("{reliq:reports}:cron", mapping=foreign)
    client.set("{reliq:broken}:cron", "x")
    client.hset("reliq:queues", "broken", 1)

    daily = next(one for one in Admin(url).crons() if one.name == "daily")

    assert daily.pause is not None
    assert daily.ticked == 253_402_300_799


def test_a_queue_that_only_ticks_is_in_the_registry(ticker, url):
    assert [view.queue for view in Admin(url).queues(interval=0).queues] == ["reports"]


def test_watch_shows_what_comes_next_and_what_is_wrong(ticker, url, client):
    def line():
        moment = Admin(url).watch().look()
        return next(text.plain for text in Screen(moment, "here", 1.0).lines(120, 40) if "periodic" in text.plain)

    assert re.fullmatch(r"periodic:  (hourly|daily) in \S+  (hourly|daily) in \S+", line())
    gone(client, "daily")
    client.hset("{reliq:reports}:cron", "hourly last", int(time.time()) - 7300)
    assert re.fullmatch(r"periodic:  hourly [12]h\d*m? late  daily no worker", line())


def test_a_worker_that_runs_publishes_what_was_asked_for(url, reports, monkeypatch):
    monkeypatch.setattr("reliq.worker.ticker.TICKER_SECONDS", 0.1)
    seen = []
    consumer = Consumer(url)
    consumer.handler(reports)(lambda body, job: seen.append(job.id))
    consumer.cron("0 6 * * *", queue=reports, body={}, name="daily")
    consumer.start()
    try:
        eventually(lambda: Admin(url).crons(), "the entry is there")
        id = Admin(url).run_cron("reports", "daily")
        eventually(lambda: seen == [id], "its handler has run")
    finally:
        consumer.stop()
