"""`reliq cron` and its `Admin` methods: list, run, pause, resume and delete periodic jobs."""

import re
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from rich.console import Console
from tenacity import wait_fixed
from transition import PATIENT_SECONDS
from waiting import eventually

from reliq import ConfigurationError, Consumer, Queue
from reliq.cli.watch import draw
from reliq.keys import WORKERS_KEY
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.worker.upkeep import TICKER_SECONDS, Ticker


@pytest.fixture
def reports(url):
    return Queue("reports", dict, url=url)


@pytest.fixture
def ticker(url, reports):
    """The started ticker of a process with two periodic jobs."""
    consumer = Consumer()
    consumer.cron("0 6 * * *", queue=reports, body={}, name="daily", tz="Europe/Berlin")
    consumer.every(3600, queue=reports, body={}, name="hourly", overlap="skip")
    # Use a separate connection: closing an Admin closes the shared connections.
    with closing(Connection.to(url).anew()) as connection:
        one = Ticker(Client(connection.wire(PATIENT_SECONDS)), consumer.periodic)
        one.step()
        yield one


@pytest.fixture
def ticking(ticker):
    """Run the ticker until the test ends."""
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
def gone(client):
    """Let the last process with a periodic job be silent for a minute."""
    return lambda name: client.hset("{reliq:reports}:cron", f"{name} seen", int(time.time()) - 60)


def test_cron_list_shows_next_and_last_ticks(ticking, command, admin, client):
    client.hset("{reliq:reports}:cron", mapping={"hourly ticked": int(time.time()) - 60, "hourly missed": 2})

    title, daily, hourly = command("cron", "list").out.splitlines()

    assert " ".join(title.split()) == "name queue schedule next last missed paused overlap"
    assert re.fullmatch(r"daily +reports +0 6 \* \* \* Europe/Berlin +in \S+ +never +0 +0 +0", daily)
    assert re.fullmatch(r"hourly +reports +every 3600 +in \S+ +1m\d*s? ago +2 +0 +0", hourly)
    admin.run_cron("reports", "hourly")
    assert "(alive)" in command("cron", "list").out.splitlines()[2], "the message that its overlap waits for"


def test_cron_list_and_watch_show_entries_with_problems(ticker, command, admin, client, gone):
    def watched():
        console = Console(width=200, height=40)
        with console.capture() as captured:
            console.print(draw(console, admin.watch().look(), "here", 1.0))
        return captured.get().splitlines()

    assert any(re.fullmatch(r"periodic: (hourly|daily) in \S+, (hourly|daily) in \S+", line) for line in watched())
    gone("daily")
    client.hset("{reliq:reports}:cron", "hourly last", int(time.time()) - 7300)
    lines = watched()
    assert any(re.match(r"hourly: its tick is [12]h\d*m? late, ", line) for line in lines)
    assert any(line.startswith("daily: no worker has it: ") for line in lines)
    client.hset("{reliq:reports}:cron", "spoilt schedule", "x")
    command("pause", "reports", "--cron", "hourly", "--reason", "the warehouse moves")

    said = command("cron", "list").out

    assert "daily: no worker has it: none runs. Start one, or delete the job if it is no longer in the code: `" in said
    assert "`reliq delete reports --cron daily`" in said
    assert re.search(r"hourly: paused by \S+ \S+ ago: the warehouse moves", said)
    assert re.search(
        r"hourly: its tick is [12]h\d*m? late, although a worker runs it: its body function fails, or ", said
    )
    assert "spoilt: this version of reliq cannot read its schedule" in said


def test_cron_list_suggests_no_deletion_while_a_worker_may_be_alive(ticker, command, client, gone, url):
    gone("daily")
    consumer = Consumer(url)
    consumer.handler(Queue("others", dict, url=url))(lambda body: None)
    consumer.start()
    try:
        said = eventually(lambda: "process runs" in (out := command("cron", "list").out) and out, "the worker is known")
    finally:
        consumer.stop()

    assert "daily: no worker has it: 1 worker process runs, without it in the code" in said
    assert "delete" not in said

    client.config_set("maxmemory", 1)  # no worker can write its record
    try:
        client.delete(WORKERS_KEY)
        said = command("cron", "list").out
    finally:
        client.config_set("maxmemory", 0)
    assert "daily: no worker has reported it for 1m" in said
    assert ", and the workers are unknown" in said
    assert "delete" not in said


def test_entry_with_a_failing_body_stays_registered_and_is_late(url, reports, client, command, monkeypatch):
    monkeypatch.setattr("reliq.worker.upkeep.BODY_BACKOFF", wait_fixed(60))
    consumer = Consumer()
    consumer.every(10, queue=reports, body=lambda tick: 1 / 0, name="broken")
    connection = Connection.to(url).anew()
    one = Ticker(Client(connection.wire(PATIENT_SECONDS)), consumer.periodic)
    one.step()
    client.hset("{reliq:reports}:cron", "broken last", int(time.time()) - 600)

    assert [one.step() <= TICKER_SECONDS for _ in range(2)] == [True, True]

    connection.close()
    assert re.search(
        r"broken: its tick is (9m\d+s|10m.*) late, although a worker runs it: its body function",
        command("cron", "list").out,
    )


def test_cron_run_of_a_paused_entry_is_published_by_a_worker(ticking, command, reports):
    assert command("pause", "reports", "--cron", "daily", "--json").json == {"paused": True, "queue": "reports"}

    said = command("cron", "run", "reports", "daily").out

    assert re.fullmatch(r"published cron\.daily\.run\.\d{13} to reports\n", said)
    with reports.receive() as [job]:
        assert (job.id, job.headers["reliq-tick"][:2]) == (said.split()[1], "20")
    assert command("cron", "run", "reports", "daily", "--json").json["id"].startswith("cron.daily.run.")


def test_cron_run_without_a_worker_is_refused_or_withdrawn(ticker, command, admin, client, gone):
    with pytest.raises(ConfigurationError, match="no worker has published the periodic job 'daily' within 0.01 s"):
        admin.run_cron("reports", "daily", wait=0.01)
    assert not client.hexists("{reliq:reports}:cron", "daily asked")

    gone("daily")
    ran = command("cron", "run", "reports", "daily")
    assert (ran.code, "no worker has the periodic job 'daily' now" in ran.err) == (2, True)


def test_cron_run_repeated_before_its_publish_is_published_once(ticker, admin, client, monkeypatch):
    client.hset("{reliq:reports}:cron", "daily asked", 1_800_000_000_000)
    waits = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: ticker.step())
    monkeypatch.setattr("reliq.admin.crons.time", waits)

    assert admin.run_cron("reports", "daily") == "cron.daily.run.1800000000000"
    assert client.llen("{reliq:reports}:ready") == 1


def test_cron_pause_ends_with_resume(ticker, command, admin):
    assert (
        command("pause", "reports", "--cron", "daily").out
        == "daily of reports is paused; `reliq resume reports --cron daily` ends it\n"
    )
    assert command("resume", "reports", "--cron", "daily").out == "daily of reports is resumed\n"
    assert command("resume", "reports", "--cron", "daily").out == "daily of reports was not paused\n"
    assert command("resume", "reports", "--cron", "daily", "--json").json == {"was_paused": False}
    assert admin.crons()[0].pause is None


def test_cron_resume_skips_and_counts_the_ticks_of_a_pause_without_workers(ticker, admin, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.crons.TICKS_TOGETHER", 2)
    admin.pause_cron("reports", "hourly")
    last = int(client.hget("{reliq:reports}:cron", "hourly last"))
    client.hset("{reliq:reports}:cron", "hourly last", last - 5 * 3600)

    admin.resume_cron("reports", "hourly")
    ticker.step()

    [hourly] = [one for one in admin.crons() if one.name == "hourly"]
    assert (hourly.skipped["paused"], hourly.missed, client.exists("{reliq:reports}:ready")) == (5, 0, 0)
    assert hourly.next == (last // 3600 + 1) * 3600
    registered = [view.queue for view in admin.queues().queues]
    assert registered == ["reports"], "a queue that only ticks"


def test_delete_of_a_periodic_job_is_refused_while_a_worker_has_it(ticker, command, client, admin, gone):
    refused = command("delete", "reports", "--cron", "daily", "--yes")
    assert (refused.code, "remove the job from the code" in refused.err) == (2, True)
    gone("daily")

    assert command("delete", "reports", "--cron", "daily", "--yes").out == "daily of reports is deleted\n"

    assert [one.name for one in admin.crons()] == ["hourly"]
    assert not [name for name in client.hkeys("{reliq:reports}:cron") if name.startswith(b"daily ")]


def test_unknown_entry_is_refused(ticker, command):
    for words in ("cron run reports nope", *(f"{verb} reports --cron nope" for verb in ("pause", "resume"))):
        assert command(*words.split())[::2] == (
            2,
            "reliq: queue 'reports' has no periodic job 'nope'; it has daily, hourly\n",
        )
    assert "no periodic job 'nope'" in command("delete", "reports", "--cron", "nope", "--yes").err
    assert command("pause", "reports", "--cron", "daily", "--for", "1h").code == 2


def test_foreign_fields_hide_no_entry(ticker, admin, client):
    foreign = {"": "x", "x": "y", " schedule": "z", b"\xff schedule": b"\xff"}
    foreign |= {"daily pause": b"\xff", "daily ticked": "9" * 18}
    client.hset("{reliq:reports}:cron", mapping=foreign)
    client.set("{reliq:broken}:cron", "x")
    client.hset("reliq:queues", "broken", 1)

    daily = next(one for one in admin.crons() if one.name == "daily")

    assert daily.pause is not None
    assert daily.ticked == 253_402_300_799


def test_running_worker_publishes_a_requested_run(url, admin, reports, monkeypatch):
    monkeypatch.setattr("reliq.worker.upkeep.TICKER_SECONDS", 0.1)
    seen = []
    consumer = Consumer(url)
    consumer.handler(reports)(lambda body, job: seen.append(job.id))
    consumer.cron("0 6 * * *", queue=reports, body={}, name="daily")
    consumer.start()
    try:
        eventually(admin.crons, "the entry is there")
        id = admin.run_cron("reports", "daily")
        eventually(lambda: seen == [id], "its handler has run")
    finally:
        consumer.stop()
