"""Every page shows a queue of several shards as one queue."""

import html
import re

import pytest

from reliq import OutgoingMessage, Queue
from reliq.keys import Keys
from reliq.redis.shards import ShardMap
from reliq.web import pages

SHARDS, MESSAGES = 4, 130


@pytest.fixture
def sharded(client, url):
    """Messages in four shards, some of them dead; the queue's name is not used by other tests."""
    client.set(Keys("freight").map, ShardMap(1, SHARDS, SHARDS).text)
    queue = Queue("freight", dict, url=url)
    queue.publish_many(OutgoingMessage(body={}, delay=3600 + at) for at in range(MESSAGES))
    queue.publish_many({} for _ in range(12))
    for at in range(12):
        told = {"id": f"dead-{at}", "value": b"RELIQ/1 {}\n{}", "note": "failed 1 x"}
        client.xadd(Keys("freight", shard=at % SHARDS).dead, told)
    return queue


def ids_on(client, path):
    """Return the ids of a list, following the links from page to page."""
    seen = []
    while path:
        page = client.get(path).text
        seen += re.findall(r'<th scope="row">[^<]*<a class="id"[^>]*>([^<]*)</a>', page)
        following = re.search(r'rel="next" href="([^"]*)"', page)
        path = html.unescape(following[1]) if following else ""
    return seen


@pytest.mark.parametrize(("path", "number"), [("messages/pending", MESSAGES), ("messages/ready", 12), ("dead", 12)])
def test_list_has_the_messages_of_all_shards_page_by_page(path, number, sharded, site):
    ids = ids_on(site.program(), f"/queues/freight/{path}")

    assert (len(ids), len(set(ids))) == (number, number)


def test_pages_count_all_shards(sharded, site, monkeypatch):
    monkeypatch.setattr(pages, "GROUPS_SECONDS", 60)
    program = site.program()

    assert "Its 4 shards together." in program.get("/queues/freight").text
    assert f">{MESSAGES}</a>" in program.get("/").text
    assert "Looked at 12 of 12" in program.get("/queues/freight/dead").text
    assert "Nothing is missing" in program.get("/account").text


def test_message_of_any_shard_has_its_page_and_is_cancelled(sharded, site):
    program, browser = site.program(), site.browser()
    ids = ids_on(program, "/queues/freight/messages/pending")
    shown = [program.get("/queues/freight/message", params={"id": id}).status_code for id in ids[:8]]
    told = [browser.post("/queues/freight/cancel", data={"id": id}).headers["location"] for id in ids[:8]]

    assert {id.partition("~")[2] for id in ids} == {"", "1", "2", "3"}
    assert shown == [200] * 8
    assert {place.rpartition("done=")[2] for place in told} == {"cancel"}
    assert sharded.counts().pending == MESSAGES - 8
