"""`reliq list --state dead`, `redrive` and `purge`: filter, read, republish at a rate, and delete dead letters."""

import re
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from handling import bury_all, handle_all

from reliq import Queue, Tasks
from reliq.admin import Filter
from reliq.admin.bulk import copy_id


@pytest.fixture(autouse=True)
def the_account_balances(queue):
    yield
    assert queue.counts().missing == 0


@pytest.fixture
def letters(queue, die):
    """Four dead letters."""
    die("a", error="card declined", headers={"tenant": "acme"})
    die("b", error="no route", headers={"tenant": "bits"})
    die("c", error="card declined: limit")
    die("d", error="no route")


def listed(command, *words):
    ran = command("list", "q", "--state", "dead", *words, "--json")
    assert ran.code == 0, ran.err
    return "".join(one["id"] for one in ran.json)


def test_dead_list_filters(command, letters):
    for words, ids in {
        "": "dcba",
        "--limit 2": "dc",
        "--error declined": "ca",
        "--error declined --header tenant=acme": "a",
        '--match "id":"d"': "d",
        "--reason rejected": "dcba",
        "--reason lease": "",
        "b d nobody": "db",
    }.items():
        assert listed(command, *words.split()) == ids, words


def test_dead_list_filters_by_age(command, queue, client, letters):
    found = client.xrange(queue.keys.dead)
    client.delete(queue.keys.dead)
    for hours, (_, fields) in zip((5, 3, 2, 0), found, strict=True):
        client.xadd(queue.keys.dead, fields, id=f"{int((time.time() - hours * 3600) * 1000)}-0")

    assert listed(command, "--older-than", "150m") == "ba"
    assert listed(command, "--newer-than", "150m") == "dc"
    assert listed(command, "--older-than", "1h", "--newer-than", "4h") == "cb"


def test_dead_show_prints_the_whole_letter(command, queue, die):
    die("m", error="card declined", headers={"tenant": "acme"})

    shown = command("show", "q", "m").out

    assert all(part in shown for part in ("card declined", "acme", '{\n  "id": "m"\n}'))
    assert re.search(r"^ +dead letter  \S+, died 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC$", shown, re.MULTILINE)
    assert command("show", "q", "m", "--raw").out == '{"id":"m"}'
    assert command("show", "q", "m", "--json").json["headers"] == {"tenant": "acme"}
    queue.publish({"id": "again"}, id="m", ignore_dedup=True)
    told = command("show", "q", "m", "--json").json
    (letter,) = told["letters"]
    assert (told["state"], letter["payload"], letter["headers"]) == ("ready", {"id": "m"}, {"tenant": "acme"})
    handle_all(queue)


def test_redrive_and_purge_take_matching_letters_only(command, queue, letters):
    redrive = ("redrive", "q", "--error", "declined")
    purge = ("purge", "q", "--state", "dead", "--match", '"id":"d"')
    assert command(*redrive, "--dry-run").out == "2 would be redriven\n"
    assert command(*redrive).out == "2 redriven\n"
    assert (listed(command), [body["id"] for body in handle_all(queue)]) == ("db", ["a", "c"])

    assert command(*purge, "--dry-run").out == "1 would be deleted\n"
    assert command(*purge, "--yes").out == "1 deleted\n"
    assert (listed(command), queue.counts().totals["dead"]) == ("b", 4)


def test_redrive_obeys_retries_delay_and_limit(command, queue, letters, client):
    command("redrive", "q", "a", "--retries", 1, "--delay", "10m")
    assert client.hget(queue.keys.retries_left, "a") == b"1"
    assert client.zscore(queue.keys.pending, "a") == pytest.approx(time.time() + 600, abs=60)

    assert command("redrive", "q", "--all", "--yes", "--limit", 2).out == "2 redriven\n"
    assert listed(command) == "d"


def test_redrive_of_an_id_that_lives_or_has_no_letter_reports_it(command, queue, die):
    die("m", "n")
    queue.publish({}, id="m", ignore_dedup=True)

    assert command("redrive", "q", "m").out == "0 redriven, 1 kept: their ids are in use, or the queue refuses them\n"
    ran = command("redrive", "q", "n", "nobody")
    assert (ran.code, ran.out) == (2, "1 redriven\n")
    assert "has no dead letter of nobody" in ran.err
    assert listed(command) == "m"


def test_redrive_to_another_queue_keeps_headers_and_retries(command, queue, url, letters):
    other = Queue("other", url=url)
    other.publish({}, id="first")

    ran = command("redrive", "q", "--header", "tenant=acme", "--to", "other", "--json")

    assert ran.json == {"verb": "redriven", "found": 1, "done": 1, "running": 0, "kept": 0, "gone": 0}
    with other.receive(limit=10) as jobs:
        [job] = [job for job in jobs if job.id != "first"]
        assert job.id.startswith("a.")
        assert (job.body, job.headers, job.retries_left) == ({"id": "a"}, {"tenant": "acme"}, 12)
    assert other.counts().missing == 0
    assert listed(command) == "dcb"


def test_id_of_a_copy_belongs_to_one_death_and_does_not_grow(queue, die):
    die("m", "m", ignore_dedup=True)
    first, second = queue.dead_letters()

    assert copy_id(first) != copy_id(second)
    died_there = type(first)(second.letter, copy_id(first), *[None] * 6)
    assert copy_id(died_there) == f"m.{second.letter}"
    long = type(first)(first.letter, "x" * 128, *[None] * 6)
    assert len(copy_id(long)) <= 128


def test_messages_that_die_again_during_a_redrive_stay_dead(queue, die, admin):
    die("a", "b")

    done = admin.redrive("q", rate=1000, on_step=lambda _looked, _sum: bury_all(queue))

    assert (done.done, queue.counts().dead) == (2, 2)


def test_many_letters_are_redriven_in_bounded_steps(queue, admin):
    queue.publish_many([{"n": n} for n in range(700)])
    bury_all(queue)
    steps = []

    done = admin.redrive("q", on_step=lambda looked, _sum: steps.append(looked))

    assert (done.done, queue.counts().ready) == (700, 700)
    assert max(steps) <= 500


def test_rate_is_kept_by_waiting_and_a_long_wait_reports_progress(monkeypatch, queue, admin, die):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic, clock.sleep = lambda: clock.now, lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("reliq.admin.messages.time", clock)
    die(*(f"m{number:02}" for number in range(60)))
    steps = []

    assert admin.redrive("q", rate=100.0, limit=59, on_step=lambda *_: steps.append(clock.now)).done == 59
    assert 0.3 < clock.now - 100 <= 0.6

    steps.clear()
    assert admin.redrive("q", rate=0.5, on_step=lambda *_: steps.append(clock.now)).done == 1
    assert max(after - before for before, after in pairwise(steps)) <= 0.21
    assert 1.5 < steps[-1] - steps[0] <= 2.1


def test_large_letters_are_read_one_at_a_time(queue, admin, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.show.SEARCH_SECONDS", 100.0)
    for number in range(12):
        client.xadd(queue.keys.dead, {"id": f"large-{number}", "value": b"x" * 1_000_000, "note": "failed 1 x"})
    client.hset(queue.keys.totals, mapping={"published": 12, "dead": 12})
    steps = []

    found = admin.count("q", "dead", Filter(reason="failed"), on_step=lambda looked, _: steps.append(looked))

    assert (found, steps[0], max(steps)) == (12, 1, 1)
    assert admin.show("q", "large-3").state == "dead"


@pytest.mark.parametrize("options", [{"key": "tenant-7"}, {"priority": "high"}], ids=["key", "priority"])
def test_redriven_letter_keeps_its_key_or_priority(command, queue, url, client, die, options):
    other, line = Queue("other", url=url), options.get("key", "\x01high")
    die("a", "b", **options)

    if "key" in options:
        assert listed(command, "--key", "nobody") == ""
        assert command("list", "q", "--state", "dead", "--key", "tenant-7", "--json").json[-1]["id"] == "a"
    assert command("redrive", "q", "a").out == "1 redriven\n"
    assert client.lrange(queue.keys.line(line), 0, -1) == [b"a"]
    other.publish({}, id="first")
    assert command("redrive", "q", "b", "--to", "other").out == "1 redriven\n"
    [copy] = client.lrange(other.keys.line(line), 0, -1)
    assert client.hget(other.keys.retries_left, copy) == f"12 {line}".encode()


def test_task_chooses_messages_by_their_task(command, url):
    app = Tasks("tasks", url=url)
    for name in ("send", "charge"):
        app.task(name=name, retries=0)(lambda: 1 / 0).options(id=name).publish()

    assert re.search(r"^ +task +send$", command("show", "tasks", "send").out, re.MULTILINE)
    assert [one["id"] for one in command("list", "tasks", "--task", "charge", "--json").json] == ["charge"]
    app.drain(raise_errors=False)
    letters = command("list", "tasks", "--state", "dead", "--task", "send", "--json").json
    assert [one["id"] for one in letters] == ["send"]
    assert command("redrive", "tasks", "--task", "send", "--yes").code == 0
    assert (app.queue.counts().dead, app.queue.counts().ready) == (1, 1)
