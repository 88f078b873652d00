"""Every page over a queue of 300 hostile messages: nothing breaks, and nothing in it hides, moves or runs."""

import re

import pytest

from reliq import Queue
from reliq.web.access import Access
from reliq.web.routes import PAGES
from tests.admin.hostile import TEXTS, complaints, spoil

#: What stands for each part of an address.
PARTS = {"queue": "q", "state": "ready", "id": "w1"}
#: Pages that anybody may ask who looks.
LOOKS = [page for page in PAGES if page.needs == Access.READ and page.method == "GET" and page.name != "work"]
STATES = ("pending", "ready", "unack", "retry", "garbage")


@pytest.fixture
def ids(url, client):
    Queue("other", bytes, url=url).publish(b"x")
    return spoil(client)


def addresses(page, ids):
    if page.name == "messages":
        return [(page.path.format(queue="q", state=state), {}) for state in STATES]
    if page.name == "message":
        return [(page.path.format(queue="q"), {"id": id.decode("utf-8", "replace")}) for id in ids[:60]]
    if page.name == "worker":
        return [(page.path.format(id=f"w{at}"), {}) for at in range(len(TEXTS))]
    return [(page.path.format(**PARTS), {})]


@pytest.mark.parametrize("page", LOOKS, ids=lambda page: page.name)
def test_a_page_shows_text_alone(page, site, ids):
    client = site.program()
    for path, query in addresses(page, ids):
        answer = client.get(path, params={**query, "bodies": "1"})

        assert answer.status_code in {200, 404}, (path, query, answer.text[:500])
        assert complaints(answer.text) == [], (path, query)
        assert re.search(r"<script(?! src=)|javascript:|\son\w+=", answer.text) is None, (path, query)
