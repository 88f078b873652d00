"""`reliq check` as it is typed: what it prints, and its exit code."""

import json

from typed import reliq

from reliq import Layout, Queue


def test_a_broken_queue_is_told_then_mended_then_sound(url, client):
    queue = Queue("orders", bytes, url=url)
    queue.publish(b"body", id="m")
    client.delete(queue.keys.ready)
    client.hset(queue.keys.lease, "ghost", "suspect")

    told = reliq("check", "orders", url=url)
    mended = reliq("check", "orders", "--repair", "--json", url=url)
    after = reliq("check", "orders", url=url)

    assert told[0] == 1
    assert "stray-word" in told[1]
    assert told[1].endswith("orders: 2 ids looked at; the queue is NOT sound.\n")
    report = json.loads(mended[1])
    assert mended[0] == 0
    assert {(fault["name"], fault["mended"]) for fault in report["faults"]} == {("lost", 1), ("stray-word", 1)}
    assert after == (0, "orders: 1 id looked at; the queue is sound.\n", "")


def test_a_queue_of_the_go_original_is_checked_in_its_layout(url, client, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    queue = Queue("orders", bytes, url=url, layout=Layout.hdt3213())
    queue.publish(b"body", id="m")
    client.hset(queue.keys.retries_left, "m", "x")

    code, out, _ = reliq("check", "orders", "--layout", "hdt3213", url=url)

    assert (code, waits) == (1, [5.0])
    assert "bad-count" in out


def test_a_name_that_is_none_is_refused_in_one_line(url):
    code, out, error = reliq("check", "no such", url=url)

    assert (code, out) == (2, "")
    assert error == "reliq: queue name must be 1 to 128 of A-Z a-z 0-9 _ . - , not 'no such'\n"
