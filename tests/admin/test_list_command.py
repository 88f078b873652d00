"""`reliq list`: every state, the fields of each message, and filters."""

import pytest
from transition import run_transition

from reliq import Queue
from reliq.admin.filters import Filter
from reliq.keys import Layout


def ids(ran):
    assert ran.code == 0, ran.err
    return [one["id"] for one in ran.json]


def test_list_shows_attempt_error_headers_and_body(command, queue, client, claim):
    queue.publish({"n": 0}, id="held")
    queue.publish({"n": 1}, id="nacked", retries=3, headers={"tenant": "acme"})
    _held, nacked = claim(queue, 2)
    run_transition(queue, "nack", [(nacked, 60_000, "failed 1 no route", b"")])

    queue.publish({}, id="cancelled")
    queue.publish({}, id="delayed")
    queue.cancel("cancelled")
    queue.reschedule("delayed", delay=600)

    marks = [(one["id"], one["mark"], one["size"]) for one in command("list", "q", "--json").json]
    assert marks == [("cancelled", "cancelled", None), ("delayed", "delayed", 2)]
    first, second = sorted(command("list", "q", "--state", "unack", "--json").json, key=lambda one: one["id"])

    assert (first["id"], first["mark"], first["attempt"], first["retries_left"]) == ("held", "held", 1, 12)
    assert first["when"] * 1000 == pytest.approx(client.zscore(queue.keys.unack, "held") * 1000, abs=1)
    assert (second["id"], second["mark"], second["error"]) == ("nacked", "nacked", "no route")
    assert (second["headers"], second["body"], second["size"]) == ({"tenant": "acme"}, '{"n":1}', 7)


def test_list_pages_each_state_in_order(command, queue, die):
    die("dead-1", "dead-2")
    queue.publish({}, id="waste")
    with queue.receive() as [job]:
        job.reject(reason="no")
    queue.publish_many([{"n": number} for number in range(7)])
    for number in (30, 10, 20):
        queue.publish({}, id=f"in-{number}", delay=number)

    bodies = [one["body"] for one in command("list", "q", "--limit", 3, "--json").json]
    bodies += [one["body"] for one in command("list", "q", "--limit", 10, "--offset", 3, "--json").json]

    assert bodies == [f'{{"n":{number}}}' for number in range(7)]
    states = {"pending": ["in-10", "in-20", "in-30"], "garbage": ["waste"], "dead": ["dead-2", "dead-1"]}
    for state, found in states.items():
        assert ids(command("list", "q", "--state", state, "--json")) == found
        assert ids(command("list", "q", "--state", state, "--offset", 1, "--limit", 1, "--json")) == found[1:2]
    assert command("list", "q", "--state", "dead", "--json").json[0]["error"] == "bad card"


def test_list_filters_by_header_and_body_text(command, queue, url):
    for number, tenant in enumerate(["acme", "acme", "bits"]):
        queue.publish({"n": number, "name": "Zoë"}, id=f"m{number}", headers={"tenant": tenant, "n": str(number)})
    raw = Queue("q", bytes, url=url)
    raw.publish(b'"Zo\\u00eb"', id="escaped")
    raw.publish(b'"' + b"x" * 200_000 + b'needle"', id="large")

    for words, found in {
        "--header tenant=acme": ["m0", "m1"],
        "--header tenant=acme --header n=1": ["m1"],
        '--match "n":2': ["m2"],
        "--match Zoë --limit 3 --offset 1": ["m1", "m2", "escaped"],
        "--match nobody": [],
    }.items():
        assert ids(command("list", "q", *words.split(), "--json")) == found, words
    [large] = command("list", "q", "--match", "needle", "--json").json
    assert (large["id"], large["size"], len(large["body"])) == ("large", 200_008, 1000)


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_list_skips_no_message_in_many_steps(state, url, admin):
    queue = Queue("q", int, url=url)
    queue.publish_many(range(1203)) if state == "ready" else [queue.publish(n, delay=600 + n) for n in range(303)]
    total = queue.counts().alive
    looks = []

    found = list(admin.messages("q", state, Filter(match="2"), on_step=lambda looked, _: looks.append(looked)))

    assert [int(one.body) for one in found] == [number for number in range(total) if "2" in str(number)]
    assert sum(looks) == total
    assert max(looks) <= 250


def test_list_skips_no_waiting_message_during_claims(url, admin, claim):
    queue = Queue("q", int, url=url)
    queue.publish_many(range(1000))

    found = list(admin.messages("q", "ready", Filter(match="9"), on_step=lambda *_: claim(queue, 100)))

    assert {number for number in range(500, 1000) if "9" in str(number)} <= {int(one.body) for one in found}


def test_list_shows_bare_and_empty_bodies_of_go(command, url, client):
    keys = Queue("q", bytes, url=url, layout=Layout.hdt3213()).keys
    for id, body in (("one", b"{}"), ("two", b"")):
        client.set(keys.msg(id), body)
        client.hset(keys.retries_left, id, 3)
        client.lpush(keys.ready, id)
    client.lpush(keys.ready, "gone")

    found = command("list", "q", "--layout", "hdt3213", "--json").json

    rows = [(one["id"], one["size"], one["body"], one["retries_left"]) for one in found]
    assert rows == [("one", 2, "{}", 3), ("two", 0, "", 3), ("gone", None, "", None)]


def test_list_without_messages_prints_a_sentence(command, queue):
    queue.publish({}, id="acked")
    with queue.receive() as [job]:
        job.ack()

    for words, said in {
        "list q": "no ready messages in q",
        "list q --state unack": "no unack messages in q",
        "list q --offset 5": "no more ready messages in q",
        "list q --key k": "no waiting messages in q that match",
        "list q --state dead --error card": "no dead messages in q that match",
        "list q --group": "no dead messages in q",
        "cron list q": "There is no periodic job; declare it with @consumer.cron(…), and start a worker.",
    }.items():
        assert command(*words.split()).out == f"{said}\n"
        assert command(*words.split(), "--json").json in ([], {"groups": [], "looked": 0, "of": 0})
