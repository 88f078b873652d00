"""Pages of keys and limits: read access shows them, write access changes them, and keys are plain text."""

import logging

import pytest
from waiting import eventually

from reliq import OutgoingMessage
from reliq.admin import Filter

HOSTILE = "<script>alert(1)</script> \u202e&"


@pytest.fixture
def tenants(orders):
    """Three messages of one key, and a message of a key that contains HTML."""
    orders.publish_many(OutgoingMessage(body={}, id=f"t{at}", key="tenant-7") for at in range(3))
    orders.publish({}, key=HOSTILE)
    return orders


def test_reader_sees_keys_and_limits_and_cannot_change_them(tenants, lookers):
    browser = lookers.browser()

    page = browser.get("/queues/orders/keys").text
    queue = browser.get("/queues/orders").text

    for text in (page, queue):
        assert "tenant-7" in text
        assert "in turn for a worker" in text
        assert "<script>alert" not in text
        assert "&lt;script&gt;" in text
        assert "\u202e" not in text
    assert "any number" in page
    assert 'action="/queues/orders/set_limits"' not in page
    assert browser.post("/queues/orders/set_limits", data={"per_key": "1"}).status_code == 403
    assert browser.post("/queues/orders/pause_key", data={"key": "tenant-7"}).status_code == 403
    assert tenants.counts().waiting == 4


def test_limits_are_changed_and_an_empty_field_clears_one(tenants, site, admin, caplog):
    caplog.set_level(logging.INFO)
    browser = site.browser()

    answer = browser.post("/queues/orders/set_limits", data={"per_key": "2", "rate": "100/s", "concurrency": "9"})

    assert (answer.status_code, answer.headers["location"]) == (303, "/queues/orders/keys?done=set_limits")
    limits = admin.limits("orders")
    assert (limits.per_key, limits.rate, limits.concurrency) == (2, "100/s", 9)
    assert "set_limits orders per_key=2 rate=['100/s']" in caplog.text
    page = browser.get(answer.headers["location"]).text
    assert 'name="rate" value="100/s"' in page
    assert "the new limits hold within a second" in page
    browser.post("/queues/orders/set_limits", data={"ordered": "1", "per_key": ""})
    assert (admin.limits("orders").ordered, admin.limits("orders").rate) == (True, None)
    assert browser.post("/queues/orders/set_limits", data={"rate": "fast"}).status_code == 400


def test_key_is_listed_paused_found_and_resumed(tenants, site, admin, monkeypatch):
    browser = site.browser()
    every = browser.get("/queues/orders/keys?every=1").text
    assert "tenant-7" in every
    assert "prints every key" not in every
    monkeypatch.setattr("reliq.web.pages.EVERY_KEY_LIMIT", 1)
    assert "reliq keys orders --all" in browser.get("/queues/orders/keys?every=1").text

    answer = browser.post("/queues/orders/pause_key", data={"key": "tenant-7", "for_": "10m"})

    assert answer.headers["location"] == "/queues/orders/keys?key=tenant-7&done=pause_key"
    assert "throttled, " in browser.get(answer.headers["location"]).text
    assert admin.key("orders", "tenant-7").state == "asleep"
    browser.post("/queues/orders/resume_key", data={"key": "tenant-7"})
    assert admin.key("orders", "tenant-7").state == "in turn"


def test_messages_of_a_key_are_shown_and_deleted(tenants, site, admin):
    browser = site.browser()

    assert browser.get("/queues/orders/messages/waiting").headers["location"] == "/queues/orders/keys"
    page = browser.get("/queues/orders/messages/waiting?key=tenant-7").text
    assert [f"t{at}" in page for at in range(3)] == [True] * 3
    assert "in turn for a worker" in browser.get("/queues/orders/message?id=t1").text
    assert "1 message of its key first" in browser.get("/queues/orders/message?id=t1").text
    assert "every message of key tenant-7" in page
    browser.post("/queues/orders/purge", data={"state": "waiting", "key": "tenant-7"})
    eventually(
        lambda: admin.count("orders", "waiting", Filter(key="tenant-7")) == 0, "the messages of the key are deleted"
    )
    assert admin.count("orders", "waiting") == 1
