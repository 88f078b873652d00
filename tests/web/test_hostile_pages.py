"""Every page of a queue of 300 hostile messages works; no text is hidden, moved or run as code."""

import html
import re

import pytest
from site_page import crawl

from reliq import Layout, Queue
from reliq.web.access import Access
from reliq.web.application import PAGES
from tests.admin.hostile import NAMES, TEXTS, complaints, spoil

#: Pages for every user with read access.
LOOKS = [page for page in PAGES if page.needs == Access.READ and page.method == "GET" and page.name != "task"]
STATES = ("pending", "ready", "unack", "retry", "garbage")


def addresses(page, ids):
    """Return the paths of a page for the given message ids."""
    states, workers = (
        STATES if page.name == "messages" else STATES[:1],
        range(len(TEXTS) if page.name == "worker" else 1),
    )
    paths = [page.path.format(queue="q", state=state, id=f"w{at}") for state in states for at in workers]
    asked = [id.decode("utf-8", "replace") for id in ids[:60]] if page.name == "message" else [""]
    return [(path, id) for path in paths for id in asked]


def test_pages_of_hostile_messages_show_text_alone(url, client, site):
    Queue("other", bytes, url=url).publish(b"x")
    ids, program, wrong = spoil(client), site.program(), []
    for page in LOOKS:
        for path, id in addresses(page, ids):
            answer = program.get(path, params={"id": id, "bodies": "1"})
            active = re.search(r"<script(?! src=)|javascript:|\son\w+=", answer.text)
            if answer.status_code not in {200, 404} or complaints(answer.text) or active:
                wrong.append((path, id, answer.status_code, complaints(answer.text), active))

    assert wrong == []


@pytest.mark.parametrize("name", [*NAMES, "orders/v2", "a?b#c%2f&d", "..", "."])
def test_links_and_forms_reach_a_queue_with_a_hostile_name(name, site, url, client):
    """A queue of the Go layout may have any printable name; lists of queues link to its pages."""
    queue = Queue(name, bytes, url=url, layout=Layout.hdt3213())
    queue.publish(b"x", id="m")
    client.hset(queue.keys.cron, "daily schedule", "every 60")
    browser = site.browser()
    seen = crawl(browser, ["/", "/account", "/periodic", "/doctor", "/workers"], r'href="([^"]*/queues/[^"]*)"')
    [own] = [way for way in seen if re.fullmatch(r"/queues/[^/?]+\?layout=hdt3213", way)]
    form = re.search(r'action="([^"]*/pause[^"]*)".*?</form>', browser.get(own).text, re.DOTALL)
    fields = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', form[0]))
    paused = browser.post(html.unescape(form[1]), data=fields)

    assert {way: status for way, status in seen.items() if status != 200} == {}
    assert len(seen) > 10
    assert (paused.status_code, queue.counts().paused) == (303, True)
