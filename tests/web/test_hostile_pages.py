"""Every page over a queue of 300 hostile messages: nothing breaks, and nothing in it hides, moves or runs."""

import html
import re

import pytest

from reliq import Layout, Queue
from reliq.web.access import Access
from reliq.web.routes import PAGES
from tests.admin.hostile import NAMES, TEXTS, complaints, spoil

#: What stands for each part of an address.
PARTS = {"queue": "q", "state": "ready", "id": "w1"}
#: Pages that anybody may ask who looks.
LOOKS = [page for page in PAGES if page.needs == Access.READ and page.method == "GET" and page.name != "work"]
STATES = ("pending", "ready", "unack", "retry", "garbage")


def addresses(page, ids):
    if page.name == "messages":
        return [(page.path.format(queue="q", state=state), {}) for state in STATES]
    if page.name == "message":
        return [(page.path.format(queue="q"), {"id": id.decode("utf-8", "replace")}) for id in ids[:60]]
    if page.name == "worker":
        return [(page.path.format(id=f"w{at}"), {}) for at in range(len(TEXTS))]
    return [(page.path.format(**PARTS), {})]


def test_pages_of_hostile_messages_show_text_alone(url, client, site):
    Queue("other", bytes, url=url).publish(b"x")
    ids, program, wrong = spoil(client), site.program(), []
    for page in LOOKS:
        for path, query in addresses(page, ids):
            answer = program.get(path, params={**query, "bodies": "1"})
            active = re.search(r"<script(?! src=)|javascript:|\son\w+=", answer.text)
            if answer.status_code not in {200, 404} or complaints(answer.text) or active:
                wrong.append((path, query, answer.status_code, complaints(answer.text), active))

    assert wrong == []


@pytest.mark.parametrize("name", [*NAMES, "orders/v2", "a?b#c%2f&d", "..", "."])
def test_links_and_forms_reach_a_queue_with_a_hostile_name(name, site, url, client):
    """A queue of the Go layout may have any printable name; its pages are found from those that list all queues."""
    queue = Queue(name, bytes, url=url, layout=Layout.hdt3213())
    queue.publish(b"x", id="m")
    client.hset(queue.keys.cron, "daily schedule", "every 60")
    browser, ways, seen = site.browser(), ["/", "/account", "/periodic", "/doctor", "/workers"], {}
    while ways:
        answer = browser.get(way := ways.pop())
        seen[way] = answer.status_code
        found = {html.unescape(link) for link in re.findall(r'href="([^"]*/queues/[^"]*)"', answer.text)}
        ways += sorted(found - seen.keys() - {*ways})
    [own] = [way for way in seen if re.fullmatch(r"/queues/[^/?]+\?layout=hdt3213", way)]
    form = re.search(r'action="([^"]*/pause[^"]*)".*?</form>', browser.get(own).text, re.DOTALL)
    fields = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', form[0]))
    paused = browser.post(html.unescape(form[1]), data=fields)

    assert {way: status for way, status in seen.items() if status != 200} == {}
    assert len(seen) > 10
    assert (paused.status_code, queue.counts().paused) == (303, True)
