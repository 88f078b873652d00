"""`reliq show` and `reliq ends`: where a message is, or what became of it."""

import subprocess
import sys
import time

import pytest

from reliq import Queue, commands
from reliq.admin import Admin
from reliq.keys import Layout
from reliq.roster import Slot, Worker
from reliq.transitions import CallNumber

#: In microseconds: when every lease and every wait of these tests is over.
LATER = int(time.time() * 1e6) + 3_600_000_000


@pytest.fixture
def show(command):
    """What `reliq show q ID --json` says."""
    return lambda name, *words: command("show", "q", name, "--json", *words).json


@pytest.fixture
def raw(url):
    """Run the command in a process of its own: what it writes is no text."""

    def run(*words):
        command = [sys.executable, "-m", "reliq", *words, "--url", url]
        return subprocess.run(command, capture_output=True, check=False)

    return run


def test_a_delayed_message_is_shown_with_its_body_and_headers(command, show, queue):
    queue.publish({"n": 1, "to": ["a"]}, id="m", delay=3600, headers={"trace": "abc"}, retries=5, ttl=60)

    told = show("m")

    names = ("state", "body", "headers", "deliveries", "retries_left", "reason")
    assert [told[name] for name in names] == ["pending", {"n": 1, "to": ["a"]}, {"trace": "abc"}, 0, 5, ""]
    assert 3500 < told["due"] - time.time() < 3601
    assert 3500 < told["ttl_left"] < 3661
    text = command("show", "q", "m").out
    assert '  "n": 1,' in text.split("\n")
    assert "trace: abc" in text


def test_a_message_that_is_due_is_ready(show, queue):
    queue.publish({}, id="m")

    assert (show("m")["state"], show("m")["deliveries"]) == ("ready", 0)


def test_a_message_that_runs_says_who_has_it_since_when(command, show, queue, client):
    queue.publish({}, id="m")
    now = time.time()
    slot = Slot("q", "m", 1, now - 90)
    worker = Worker("w1", "db1", 7, "1", ("q",), 4, 1, now, now, now, (slot,))
    with queue.receive():
        assert (show("m")["state"], show("m")["holder"]) == ("leased", None)
        for beat in commands.write_worker(worker):
            client.execute_command(*beat.command)

        told = show("m")

        assert (told["holder"]["host"], told["holder"]["pid"], told["holder"]["worker"]) == ("db1", 7, "w1")
        assert told["holder"]["seconds"] >= 90
        assert (told["deliveries"], told["leased_until"] > now) == (1, True)
        assert "in db1 pid 7 (worker w1)" in command("show", "q", "m").out


def test_a_message_between_two_tries_says_what_went_wrong(show, queue):
    queue.publish({}, id="m", retries=3)
    with queue.receive() as [job]:
        job.nack(delay=600, reason="gateway down")

    told = show("m")

    names = ("state", "reason", "error", "deliveries", "retries_left")
    assert [told[name] for name in names] == ["backoff", "failed", "gateway down", 1, 3]
    assert 500 < told["due"] - time.time() < 601


def test_deliveries_that_were_given_back_are_said_not_to_be_counted(command, queue):
    queue.publish({}, id="snoozed")
    with queue.receive() as [job]:
        job.snooze(delay=600)
    queue.publish({}, id="released")
    queue.moves.release(queue.moves.claim(CallNumber("w", 1), limit=1, lease_ms=60_000).claimed)

    for id in ("released", "snoozed"):
        assert "deliveries  0 (snoozed and released ones are not counted)\n" in command("show", "q", id).out


def test_a_message_to_be_delivered_again_is_in_retry(show, queue):
    queue.publish({}, id="m", retries=3)
    with queue.receive() as [job]:
        job.nack(delay=0, reason="x")
    queue.moves.reclaim(clock=LATER)

    assert (show("m")["state"], show("m")["retries_left"]) == ("retry", 2)


def test_a_suspect_and_a_cancelled_one_say_so(command, show, queue):
    queue.publish({}, id="m", retries=3)
    queue.moves.claim(CallNumber("w", 1), limit=1, lease_ms=1)
    queue.moves.reclaim(clock=LATER)
    assert show("m")["suspect"] is True

    queue.cancel("m")

    told = show("m")
    assert (told["cancelled"], told["body"]) == (True, None)
    assert "retry (cancelled)" in command("show", "q", "m").out


def test_one_deep_in_a_long_list_is_in_one_of_two(show, queue, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.show.LOOK_THROUGH", 3)
    for number in range(9):
        queue.publish({}, id=f"m{number}", retries=3)
        client.hset(queue.keys.retries_left, f"m{number}", 2)

    assert [show(id)["state"] for id in ("m0", "m4", "m8")] == ["ready", "ready or retry", "ready"]


def test_one_at_its_end_that_is_not_collected_is_garbage(show, queue):
    queue.publish({}, id="m")
    with queue.receive() as [job]:
        job.reject(reason="bad card")

    assert [show("m")[name] for name in ("state", "reason", "error")] == ["garbage", "rejected", "bad card"]


def test_one_whose_body_is_gone_says_so(command, queue, client):
    queue.publish({}, id="m")
    client.delete(queue.keys.msg("m"))

    assert "its body is gone, so it will expire" in command("show", "q", "m").out


def test_a_message_of_the_go_original_is_shown_as_far_as_it_says(command, url):
    Queue("go", bytes, url=url, layout=Layout.hdt3213()).publish(b"\x00\xffbytes", id="m")

    told = command("show", "go", "m", "--layout", "hdt3213", "--json").json

    assert (told["state"], told["due"], told["deliveries"], told["body"]) == ("ready", None, None, "AP9ieXRlcw==")
    assert "\\x00\\xffbytes" in command("show", "go", "m", "--layout", "hdt3213").out


# ---- the body alone ---------------------------------------------------------


def test_raw_is_the_body_and_nothing_else(url, raw):
    body = b"\x00\xff\r\n\x1b[2J"
    Queue("q", bytes, url=url).publish(body, id="m")

    done = raw("show", "q", "m", "--raw")

    assert (done.returncode, done.stdout, done.stderr) == (0, body, b"")


def test_raw_of_a_body_that_is_gone_is_an_error(command, queue):
    queue.publish({}, id="m", delay=60)
    queue.cancel("m")

    done = command("show", "q", "m", "--raw")

    assert (done.code, done.out) == (2, "")
    assert "has no body any more" in done.err


def test_what_a_terminal_would_obey_is_not_printed(command, url):
    Queue("q", bytes, url=url).publish(b"\x1b[2Jtext", id="m")

    assert "\x1b" not in command("show", "q", "m").out


# ---- what became of it ------------------------------------------------------


def test_a_dead_one_is_shown_with_its_letter(command, show, queue, die):
    die("order-42", error="no such card")

    told = show("order-42")

    names = ("state", "reason", "error", "deliveries", "body")
    assert [told[name] for name in names] == ["dead", "rejected", "no such card", 1, {"id": "order-42"}]
    (end,), (letter,) = told["ends"], told["letters"]
    assert (end["kind"], end["letter"]) == ("dead", letter["letter"])
    assert "dead" in command("show", "q", "order-42").out


def test_a_dead_one_whose_end_is_forgotten_is_found_among_the_letters(show, queue, die, client):
    die(*(f"m{number}" for number in range(60)))
    client.delete(queue.keys.ends, *client.keys(queue.keys.dedup("*")))

    told = show("m3")

    assert (told["state"], told["ends"], told["searched_all"]) == ("dead", [], True)
    assert [letter["id"] for letter in told["letters"]] == ["m3"]


def test_a_search_that_takes_too_long_says_that_it_gave_up(command, queue, die, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.ends.SEARCH_SECONDS", 0.0)
    die("m")
    client.delete(queue.keys.ends, queue.keys.dedup("m"))

    done = command("show", "q", "m")

    assert done.code == 2
    assert "among too many to look through" in done.err


def test_a_cancelled_one_is_shown_with_when_it_ended(command, show, queue):
    queue.publish({}, id="order-42", delay=60)
    queue.cancel("order-42")

    told = show("order-42")

    assert (told["state"], told["body"], [end["kind"] for end in told["ends"]]) == ("finished", None, ["cancelled"])
    assert told["taken_seconds"] is None
    assert abs(told["ends"][0]["at"] - time.time()) < 60
    text = command("show", "q", "order-42").out
    assert ("cancelled" in text, "id taken" in text) == (True, False)


def test_a_cancelled_ids_tombstone_is_shown_until_a_publish_would_be_taken(command, show, queue):
    queue.publish({}, id="order-42", delay=60)
    queue.cancel("order-42", tombstone=60)

    assert 0 < show("order-42")["taken_seconds"] <= 60
    assert "id taken" in command("show", "q", "order-42").out
    assert queue.publish({}, id="order-42").status == "tombstoned"


def test_an_acked_one_is_known_where_history_is_kept(url, command, show):
    with Queue("q", url=url, history=10).receive() as jobs:
        assert jobs == []
    queue = Queue("q", url=url, history=10)
    queue.publish({}, id="m", dedup=0)
    with queue.receive():
        pass

    assert [end["kind"] for end in show("m")["ends"]] == ["acked"]
    assert [end["id"] for end in command("ends", "q", "--kind", "acked", "--json").json] == ["m"]


def test_an_acked_one_without_history_is_gone_while_its_id_stays_taken(command, queue):
    queue.publish({}, id="m")
    with queue.receive():
        pass

    out = command("show", "q", "m").out

    assert "finished: acked messages are not kept (set history= to keep them)" in out
    assert "id taken" in out


def test_one_that_lives_again_is_shown_with_its_former_ends(show, queue):
    for _ in range(2):
        queue.publish({}, id="m", delay=60, replace=True)
        queue.cancel("m")
    queue.publish({}, id="m", replace=True)

    told = show("m")

    assert (told["state"], [end["kind"] for end in told["ends"]]) == ("ready", ["cancelled", "cancelled"])


def test_an_unknown_id_is_one_line_and_exit_2(command, queue):
    queue.publish({})

    done = command("show", "q", "order-43")

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "knows no message 'order-43'" in done.err


# ---- ends -------------------------------------------------------------------


@pytest.fixture
def ended(queue, die, client):
    """A dead one, a cancelled one, a purged one and an expired one, in this order."""
    die("dead", error="no such card")
    queue.publish({}, id="cancelled", delay=60)
    queue.cancel("cancelled")
    queue.publish({}, id="purged")
    queue.moves.purge(["purged"], state="ready")
    queue.publish({}, id="expired")
    client.delete(queue.keys.msg("expired"))
    with queue.receive() as jobs:
        assert jobs == []


def test_ends_are_listed_with_their_reasons_the_newest_first(command, ended):
    rows = [line.split() for line in command("ends", "q").out.splitlines()[1:]]

    assert [row[2:4] for row in rows] == [[kind, kind] for kind in ("expired", "purged", "cancelled", "dead")]
    assert " ".join(rows[-1][4:]) == "rejected (delivery 1): no such card"


@pytest.mark.parametrize("kind", ["dead", "expired", "cancelled", "purged"])
def test_ends_of_one_kind(command, ended, kind):
    assert [end["id"] for end in command("ends", "q", "--kind", kind, "--json").json] == [kind]


def test_ends_have_a_limit(command, ended):
    assert [end["id"] for end in command("ends", "q", "--limit", "2", "--json").json] == ["expired", "purged"]


def test_all_that_is_remembered_is_read_page_by_page(url, queue, monkeypatch):
    monkeypatch.setattr("reliq.admin.ends.PAGE", 7)
    ids = [f"m{number}" for number in range(50)]
    for id in ids:
        queue.publish({}, id=id, delay=60)
    queue.moves.cancel(ids)

    assert [end.id for end in Admin(url).ends("q")] == ids[::-1]
    assert [end.kind for end in Admin(url).show("q", "m0").ends] == ["cancelled"]


def test_none_is_remembered(command, queue):
    queue.publish({})

    assert command("ends", "q").out == "None is remembered.\n"
    assert "history" in command("ends", "q", "--kind", "acked").out


@pytest.mark.parametrize("words", [["--kind", "lost"], ["--limit", "0"]])
def test_ends_asked_for_wrongly_is_one_line_and_exit_2(command, queue, words):
    queue.publish({})

    done = command("ends", "q", *words)

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_one_that_waits_after_its_second_death_is_in_backoff_and_a_suspect(show, queue, client):
    queue.publish({"x": 1}, id="twice")
    queue.moves.claim(CallNumber("w", 1), limit=1, lease_ms=1000)
    client.hset(queue.keys.lease, "twice", "suspect2")

    assert (show("twice")["state"], show("twice")["suspect"]) == ("backoff", True)

    client.hset(queue.keys.lease, "twice", "2~w.1:1000")
    assert (show("twice")["state"], show("twice")["suspect"]) == ("leased", True)
