"""`reliq show` and `reliq ends`: the state of a message, or how it finished."""

import subprocess
import sys
import time

import pytest
from transition import run_transition

from reliq import Queue
from reliq.admin import Admin
from reliq.keys import Layout
from reliq.redis.commands import RunningJob
from reliq.wire_format import encoded_checkpoint

#: In microseconds: after every lease and every wait of these tests.
LATER = int(time.time() * 1e6) + 86_400_000_000


@pytest.fixture
def show(command):
    """Return the output of `reliq show q ID --json`."""
    return lambda name, *words: command("show", "q", name, "--json", *words).json


def test_show_prints_progress_and_checkpoint(command, show, queue, claim):
    queue.publish({}, id="m")
    queue.publish({}, id="silent")
    saved = encoded_checkpoint(1, 0, {"row": 7}, "0.4 page 40")
    run_transition(queue, "checkpoint", [(claim(queue)[0], 1, saved)])

    assert [show("m")[name] for name in ("progress", "note", "cursor")] == [0.4, "page 40", {"row": 7}]
    text = command("show", "q", "m").out
    assert "40.0% page 40" in text
    assert '{"row": 7}' in text
    assert [show("silent")[name] for name in ("progress", "note", "cursor")] == [None, "", None]
    assert "progress" not in command("show", "q", "silent").out


def test_show_prints_a_cost_other_than_1(command, show, queue):
    queue.publish({}, id="large", cost=800)
    queue.publish({}, id="usual")

    assert [show(id)["cost"] for id in ("large", "usual")] == [800, 1]
    assert "cost  800" in command("show", "q", "large").out
    assert "cost" not in command("show", "q", "usual").out


def test_show_prints_state_body_and_headers(command, show, queue):
    queue.publish({"n": 1, "to": ["a"]}, id="m", delay=3600, headers={"trace": "abc"}, retries=5, ttl=60)
    queue.publish({}, id="now")

    told = show("m")

    names = ("state", "body", "headers", "attempt", "retries_left", "reason")
    assert [told[name] for name in names] == ["pending", {"n": 1, "to": ["a"]}, {"trace": "abc"}, 0, 5, ""]
    assert 3500 < told["when"] - time.time() < 3601
    assert 3500 < told["ttl_left"] < 3661
    text = command("show", "q", "m").out
    assert '  "n": 1,' in text.split("\n")
    assert "trace: abc" in text
    assert (show("now")["state"], show("now")["attempt"]) == ("ready", 0)


def test_show_names_the_worker_of_a_running_message(command, show, queue, alive):
    queue.publish({}, id="m")
    now = time.time()
    with queue.receive():
        assert (show("m")["state"], show("m")["mark"], show("m")["holder"]) == ("unack", "held", None)
        alive(running=(RunningJob("q", "m", 1, now - 90),))

        told = show("m")

        assert (told["holder"]["host"], told["holder"]["pid"], told["holder"]["worker"]) == ("db1", 7, "w1")
        assert told["holder"]["seconds"] >= 90
        assert (told["attempt"], told["when"] > now) == (1, True)
        assert "in db1 pid 7 (worker w1)" in command("show", "q", "m").out


def test_show_prints_the_error_of_a_failed_message_until_it_is_redelivered(show, queue):
    queue.publish({}, id="m", retries=3)
    with queue.receive() as [job]:
        job.nack(delay=600, reason="gateway down")
    told = show("m")
    names = ("state", "mark", "reason", "error", "attempt", "retries_left")
    assert [told[name] for name in names] == ["unack", "nacked", "failed", "gateway down", 1, 3]
    assert 500 < told["when"] - time.time() < 601

    run_transition(queue, "reclaim", clock=LATER)
    assert (show("m")["state"], show("m")["retries_left"]) == ("retry", 2)


def test_show_does_not_count_snoozed_and_released_deliveries(command, queue, claim):
    queue.publish({}, id="snoozed")
    with queue.receive() as [job]:
        job.snooze(delay=600)
    queue.publish({}, id="released")
    run_transition(queue, "release", claim(queue))

    for id in ("released", "snoozed"):
        assert "deliveries  0 (without snoozed and released deliveries)\n" in command("show", "q", id).out


def test_show_marks_suspects_and_cancelled_messages(command, show, queue, client, claim):
    queue.publish({}, id="m", retries=3)
    claim(queue, lease_ms=1)
    for word, mark in (("suspect2", "suspect"), ("2~w.1:1000", "held")):
        client.hset(queue.keys.lease, "m", word)
        assert (show("m")["state"], show("m")["mark"], show("m")["suspect"]) == ("unack", mark, True)
    client.hset(queue.keys.lease, "m", "w.1:1")
    run_transition(queue, "reclaim", clock=LATER)
    assert show("m")["suspect"] is True

    queue.cancel("m")
    assert (show("m")["mark"], show("m")["body"]) == ("cancelled", None)
    assert "retry (cancelled" in command("show", "q", "m").out


def test_show_of_a_message_deep_in_a_long_list_says_ready(show, queue, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.show.LOOK_THROUGH", 3)
    for number in range(9):
        queue.publish({}, id=f"m{number}", retries=3)
        client.hset(queue.keys.retries_left, f"m{number}", 2)

    assert [show(id)["state"] for id in ("m0", "m4", "m8")] == ["ready", "ready", "ready"]


def test_show_of_a_message_without_a_body_says_that_it_expires(command, queue, client):
    queue.publish({}, id="m")
    client.delete(queue.keys.msg("m"))

    assert "its body is gone, so it will expire" in command("show", "q", "m").out
    raw = command("show", "q", "m", "--raw")
    assert (raw.code, raw.out, "was deleted; leave --raw out" in raw.err) == (2, "", True)


def test_show_of_a_message_of_go_leaves_unknown_fields_out(command, url):
    Queue("go", bytes, url=url, layout=Layout.hdt3213()).publish(b"\x00\xffbytes", id="m")

    told = command("show", "go", "m", "--layout", "hdt3213", "--json").json

    assert (told["state"], told["when"], told["attempt"], told["body"]) == ("ready", None, None, "AP9ieXRlcw==")
    assert "\\x00\\xffbytes" in command("show", "go", "m", "--layout", "hdt3213").out


def test_raw_prints_the_body_only_and_show_escapes_it(command, url):
    body = b"\x00\xff\r\n\x1b[2J"
    Queue("q", bytes, url=url).publish(body, id="m")

    words = [sys.executable, "-m", "reliq", "show", "q", "m", "--raw", "--url", url]
    done = subprocess.run(words, capture_output=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, body, b"")
    assert "\x1b" not in command("show", "q", "m").out


def test_show_of_a_dead_message_has_its_end_and_dead_letter(command, show, queue, die):
    queue.publish({}, id="order-42", retries=0)
    with queue.receive() as [job]:
        job.reject(reason="no such card")
    for state in ("garbage", "dead"):
        told = show("order-42")
        names = ("state", "reason", "error", "attempt")
        assert [told[name] for name in names] == [state, "rejected", "no such card", 1]
        run_transition(queue, "collect", ["order-42"], dead_letter_limit=1000, letters_ms=10**9)

    (end,), (letter,) = told["ends"], told["letters"]
    assert (end["kind"], end["letter"]) == ("dead", letter["letter"])
    assert "dead" in command("show", "q", "order-42").out


def test_show_finds_a_dead_letter_without_an_end_or_exits_2(command, show, queue, die, client, monkeypatch):
    die(*(f"m{number}" for number in range(60)))
    client.delete(queue.keys.ends, *client.keys(queue.keys.dedup("*")))
    told = show("m3")
    assert (told["state"], told["ends"], told["searched_all"]) == ("dead", [], True)
    assert [letter["id"] for letter in told["letters"]] == ["m3"]

    unknown = command("show", "q", "order-43")
    assert (unknown.code, unknown.out, "no record of a message 'order-43'" in unknown.err) == (2, "", True)
    monkeypatch.setattr("reliq.admin.show.SEARCH_SECONDS", 0.0)
    done = command("show", "q", "m3")
    assert (done.code, "too many dead letters to search" in done.err) == (2, True)


def test_show_of_a_cancelled_message_has_its_end_and_tombstone(command, show, queue):
    queue.publish({}, id="order-42", delay=60)
    queue.cancel("order-42")

    told = show("order-42")
    assert (told["state"], told["body"], [end["kind"] for end in told["ends"]]) == ("ended", None, ["cancelled"])
    assert (told["taken_seconds"], abs(told["ends"][0]["at"] - time.time()) < 60) == (None, True)
    text = command("show", "q", "order-42").out
    assert ("cancelled" in text, "id taken" in text) == (True, False)

    queue.cancel("order-42", tombstone=60)
    assert 0 < show("order-42")["taken_seconds"] <= 60
    assert "id taken" in command("show", "q", "order-42").out
    queue.publish({}, id="order-42", ignore_dedup=True)
    again = show("order-42")
    assert (again["state"], {end["kind"] for end in again["ends"]}) == ("ready", {"cancelled"})


def test_show_of_an_acked_message_needs_history(url, command, show, queue):
    queue.publish({}, id="m")
    with queue.receive():
        pass
    out = command("show", "q", "m").out
    assert "ended: acked messages are not kept (set keep_completed= to keep them)" in out
    assert "id taken" in out

    kept = Queue("q", url=url, keep_completed=10)
    with kept.receive():
        pass
    kept.publish({}, id="kept", dedup=0)
    with kept.receive():
        pass
    assert [end["kind"] for end in show("kept")["ends"]] == ["acked"]
    assert [end["id"] for end in command("list", "q", "--state", "ended", "--kind", "acked", "--json").json] == ["kept"]


def test_ends_lists_the_newest_first_by_kind_and_limit(command, queue, die, client):
    die("dead", error="no such card")
    queue.publish({}, id="cancelled", delay=60)
    queue.cancel("cancelled")
    queue.publish({}, id="purged")
    run_transition(queue, "purge", ["purged"], state="ready")
    queue.publish({}, id="expired")
    client.delete(queue.keys.msg("expired"))
    with queue.receive() as jobs:
        assert jobs == []
    newest = ["expired", "purged", "cancelled", "dead"]

    rows = [line.split() for line in command("list", "q", "--state", "ended").out.splitlines()[1:]]

    assert [row[:2] for row in rows] == [[kind, kind] for kind in newest]
    assert " ".join(rows[-1][-4:]) == "rejected: no such card"
    assert [end["id"] for end in command("list", "q", "--state", "ended", "--limit", "2", "--json").json] == newest[:2]
    for kind in newest:
        assert [end["id"] for end in command("list", "q", "--state", "ended", "--kind", kind, "--json").json] == [kind]
    assert "keep_completed" in command("list", "q", "--state", "ended", "--kind", "acked").out


def test_ends_are_read_page_by_page(url, queue, monkeypatch):
    monkeypatch.setattr("reliq.admin.show.PAGE", 7)
    ids = [f"m{number}" for number in range(50)]
    for id in ids:
        queue.publish({}, id=id, delay=60)
    run_transition(queue, "cancel", ids)

    assert [end.id for end in Admin(url).messages("q", "ended")] == ids[::-1]
    assert [end.kind for end in Admin(url).show("q", "m0").ends] == ["cancelled"]
