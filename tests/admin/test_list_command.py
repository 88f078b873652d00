"""`reliq list`: every state, what is known of each message, and filters."""

import json

import pytest

from reliq import Admin, Queue
from reliq.admin.filters import Filter
from reliq.keys import Layout
from reliq.transitions import CallNumber


def ids(ran):
    assert ran.code == 0, ran.err
    return [one["id"] for one in ran.json]


def turns(count):
    return (CallNumber("a", number + 1) for number in range(count))


def test_each_message_tells_its_state(command, queue, client):
    queue.publish({"n": 0}, id="held")
    queue.publish({"n": 1}, id="nacked", retries=3, headers={"tenant": "acme"})
    held, nacked = (queue.moves.claim(turn, limit=1, lease_ms=60_000).claimed[0] for turn in turns(2))
    queue.moves.nack([(nacked, 60_000, "failed 1 no route", b"")])

    first, second = sorted(command("list", "q", "--state", "unack", "--json").json, key=lambda one: one["id"])

    assert (first["id"], first["mark"], first["attempt"], first["retries_left"]) == ("held", "held", 1, 12)
    assert first["when"] * 1000 == pytest.approx(client.zscore(queue.keys.unack, "held") * 1000, abs=1)
    assert (second["id"], second["mark"], second["error"]) == ("nacked", "nacked", "failed: no route")
    assert (second["headers"], second["body"], second["size"]) == ({"tenant": "acme"}, '{"n":1}', 7)
    assert held.id == "held"


def test_what_comes_first_is_listed_first_and_pages_join(command, queue):
    queue.publish_many([{"n": number} for number in range(7)])
    for number in (30, 10, 20):
        queue.publish({}, id=f"in-{number}", delay=number)

    bodies = [one["body"] for one in command("list", "q", "--limit", 3, "--json").json]
    bodies += [one["body"] for one in command("list", "q", "--limit", 10, "--offset", 3, "--json").json]

    assert bodies == [f'{{"n":{number}}}' for number in range(7)]
    assert ids(command("list", "q", "--state", "pending", "--json")) == ["in-10", "in-20", "in-30"]
    assert ids(command("list", "q", "--state", "pending", "--offset", 1, "--limit", 1, "--json")) == ["in-20"]


def test_garbage_and_dead_letters_are_listed(command, queue, die):
    die("dead-1", "dead-2")
    queue.publish({}, id="waste")
    with queue.receive() as [job]:
        job.reject(reason="no")

    assert ids(command("list", "q", "--state", "garbage", "--json")) == ["waste"]
    assert ids(command("list", "q", "--state", "garbage", "--offset", 1, "--json")) == []
    letters = command("list", "q", "--state", "dead", "--json").json
    assert [(one["id"], one["error"]) for one in letters] == [
        ("dead-1", "rejected: bad card"),
        ("dead-2", "rejected: bad card"),
    ]
    assert ids(command("list", "q", "--state", "dead", "--offset", 1, "--json")) == ["dead-2"]


def test_a_cancelled_a_delayed_and_a_suspected_one_are_marked_in_their_list(command, queue):
    queue.publish({}, id="cancelled")
    queue.publish({}, id="delayed")
    queue.cancel("cancelled")
    queue.reschedule("delayed", delay=600)
    found = command("list", "q", "--json").json

    assert [(one["id"], one["mark"], one["size"]) for one in found] == [
        ("cancelled", "cancelled", None),
        ("delayed", "delayed", 2),
    ]


def test_filters_go_by_header_and_by_text_of_the_body(command, queue):
    for number, tenant in enumerate(["acme", "acme", "bits"]):
        queue.publish({"n": number, "name": "Zoë"}, id=f"m{number}", headers={"tenant": tenant, "n": str(number)})

    assert ids(command("list", "q", "--header", "tenant=acme", "--json")) == ["m0", "m1"]
    assert ids(command("list", "q", "--header", "tenant=acme", "--header", "n=1", "--json")) == ["m1"]
    assert ids(command("list", "q", "--match", '"n":2', "--json")) == ["m2"]
    assert ids(command("list", "q", "--match", "Zoë", "--limit", 2, "--offset", 1, "--json")) == ["m1", "m2"]
    assert ids(command("list", "q", "--match", "nobody", "--json")) == []


def test_a_text_is_found_as_json_escapes_it_and_behind_the_start_of_a_large_body(command, url):
    raw = Queue("q", bytes, url=url)
    raw.publish(b'"Zo\\u00eb"', id="escaped")
    raw.publish(b'"' + b"x" * 200_000 + b'needle"', id="large")

    assert ids(command("list", "q", "--match", "Zoë", "--json")) == ["escaped"]
    [large] = command("list", "q", "--match", "needle", "--json").json
    assert (large["id"], large["size"], len(large["body"])) == ("large", 200_008, 1000)


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_nothing_is_passed_over_in_many_steps(state, url):
    queue, admin = Queue("q", int, url=url), Admin(url)
    queue.publish_many(range(1203)) if state == "ready" else [queue.publish(n, delay=600 + n) for n in range(303)]
    total = queue.counts().alive
    looks = []

    found = admin.messages("q", state, limit=10_000, where=Filter(headers={}, match="2"), on_look=looks.append)

    assert [int(one.body) for one in found] == [number for number in range(total) if "2" in str(number)]
    assert sum(looks) == total
    assert max(looks) <= 250


def test_what_is_claimed_meanwhile_passes_no_other_over(url):
    queue, admin = Queue("q", int, url=url), Admin(url)
    queue.publish_many(range(1000))
    claims = turns(100)

    def look(_count):
        queue.moves.claim(next(claims), limit=100, lease_ms=60_000)

    found = admin.messages("q", "ready", limit=10_000, where=Filter(match="9"), on_look=look)

    met = {int(one.body) for one in found}
    still = {number for number in range(500, 1000) if "9" in str(number)}
    assert still <= met


def test_the_table_shows_no_control_character_and_no_more_than_fits(command, queue):
    queue.publish({"text": "\x1b[2J" + "x" * 500}, id="m", headers={"a": "b"})

    ran = command("list", "q")

    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "…" in ran.out
    assert max(map(len, ran.out.splitlines())) < 200


def test_a_queue_of_the_go_original_is_listed_with_its_bare_and_empty_bodies(command, url, client):
    keys = Queue("q", bytes, url=url, layout=Layout.hdt3213()).keys
    for id, body in (("one", b"{}"), ("two", b"")):
        client.set(keys.msg(id), body)
        client.hset(keys.retries_left, id, 3)
        client.lpush(keys.ready, id)
    client.lpush(keys.ready, "gone")

    found = command("list", "q", "--layout", "hdt3213", "--json").json

    assert [(one["id"], one["size"], one["body"]) for one in found] == [
        ("one", 2, "{}"),
        ("two", 0, ""),
        ("gone", None, ""),
    ]
    assert [one["retries_left"] for one in found] == [3, 3, None]


def test_json_is_one_value_in_one_line(command, queue):
    queue.publish({})

    out = command("list", "q", "--json").out

    assert out.count("\n") == 1
    assert isinstance(json.loads(out), list)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "q"], "no ready messages in q"),
        (["list", "q", "--state", "unack"], "no unack messages in q"),
        (["list", "q", "--offset", 5], "no more ready messages in q"),
        (["list", "q", "--key", "k"], "no waiting messages in q that match"),
        (["list", "q", "--match", "card"], "no ready messages in q that match"),
        (["dead", "list", "q"], "no dead letters in q"),
        (["dead", "list", "q", "--error", "card"], "no dead letters in q that match"),
        (["dead", "list", "q", "--group"], "no dead letters in q"),
    ],
)
def test_list_without_messages_prints_a_sentence_and_no_table(words, said, command, queue):
    queue.publish({}, id="acked")
    with queue.receive() as [job]:
        job.ack()

    assert command(*words).out == f"{said}\n"
    assert json.loads(command(*words, "--json").out) in ([], {"groups": [], "looked": 0, "of": 0})
