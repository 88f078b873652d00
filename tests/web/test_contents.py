"""Users with the right see message contents on request; hostile contents harm no page."""

import pytest
from site_page import EVERYTHING, site_of
from transition import run_transition

from reliq import Queue
from reliq.lua.transitions import CallNumber
from reliq.message import DEATH_REASONS
from reliq.web import Access
from reliq.web.application import PAGES
from reliq.web.render import redacted
from reliq.wire_format import encoded_checkpoint

#: Secrets in a body, a header, the text of an error, a checkpoint, and a report of progress.
CANARIES = ("canary-body", "canary-header", "canary-error", "canary-cursor", "canary-note")
STATES = ("pending", "ready", "unack", "dead")
MESSAGES = ("dead", "failed", "running", "pending", "ready")


@pytest.fixture
def told(url, fail, alive, entry):
    """A queue whose messages in each state contain the canaries."""
    alive("w")
    entry("daily")
    queue = Queue("orders", str, url=url, retries=0)
    carried = {"body": "canary-body", "headers": {"tenant": "canary-header"}}
    queue.publish(**carried, id="dead")
    fail(queue, ValueError("canary-error"), dead=1)
    queue.publish(**carried, id="failed", retries=5)
    fail(queue, ValueError("canary-error"), dead=1, backoff=1)
    queue.publish(**carried, id="running")
    [claimed] = run_transition(queue, "claim", CallNumber("a", 1), limit=1, lease_ms=600_000).claimed
    run_transition(queue, "checkpoint", [(claimed, 1, encoded_checkpoint(1, 0, "canary-cursor", "0.4 canary-note"))])
    queue.publish(**carried, id="pending", delay=3600)
    queue.publish(**carried, id="ready")
    return queue


def pages_of(client, bodies):
    """Return the text of every page about queues, states and messages."""
    shown = [page for page in PAGES if page.method == "GET" and page.name != "task"]
    paths = {page.path.format(queue="orders", state=state, id="w") for page in shown for state in STATES}
    for path in sorted(paths):
        for id in MESSAGES if path.endswith("/message") else ("",):
            answer = client.get(path, params={"bodies": bodies, "name": "daily", "id": id})
            assert answer.status_code == 200, (path, answer.text)
            yield answer.text


def found_in(texts):
    together = "".join(texts)
    return {canary for canary in CANARIES if canary in together}


#: Access level and whether contents are requested -> the visible contents.
ASKED = {
    (Access.READ, ""): set(),
    (Access.READ, "1"): set(),
    (Access.WRITE, "1"): set(),
    (EVERYTHING, ""): set(),
    (Access.BODIES, "1"): set(CANARIES),
}


def test_bodies_headers_and_errors_are_shown_when_asked_and_allowed(url, told):
    seen = {}
    for grants, bodies in ASKED:
        with site_of(url, grants=grants) as site:
            seen[grants, bodies] = found_in(pages_of(site.program(), bodies))

    assert seen == ASKED


def test_redacted_values_of_admin_have_no_contents_of_messages(told, admin):
    values = [admin.page("orders", state).items for state in STATES]
    values += [admin.show("orders", id) for id in MESSAGES]
    values += [admin.show("orders", id).timeline for id in ("dead", "failed")]
    values += [list(admin.messages("orders", "dead")), list(admin.messages("orders", "ended")), admin.watch().look()]

    assert found_in(map(repr, values)) == set(CANARIES)
    assert found_in(map(repr, map(redacted, values))) == set()


def test_page_of_a_message_has_its_progress_and_checkpoint(site, told):
    page = site.program().get("/queues/orders/message?id=running&bodies=1").text

    assert "<dt>progress</dt><dd>40.0% canary-note</dd>" in page
    assert "<dt>checkpoint</dt>" in page
    assert "<dt>progress</dt>" not in site.program().get("/queues/orders/message?id=ready&bodies=1").text


def test_page_of_a_message_has_a_cost_other_than_1(site, orders):
    orders.publish({}, id="large", cost=800)

    assert "<dt>cost</dt><dd>800</dd>" in site.program().get("/queues/orders/message?id=large").text
    assert "<dt>cost</dt>" not in site.program().get("/queues/orders/message?id=x").text


def test_page_of_a_queue_has_the_place_of_an_error_without_its_text(site, told):
    page = site.program().get("/queues/orders?bodies=1").text

    assert found_in([page]) == set()
    assert "ValueError at" in page


def test_visitor_without_the_right_to_bodies_cannot_search_or_delete_by_them(url, told, admin):
    searches = ("dead?text=x", "dead?error=x", "messages/ready?header=a=b", f"dead?reason={DEATH_REASONS[0]}")
    forms = {
        "purge?state=dead": {"text": "canary-body"},
        "redrive": {"error": "canary"},
        "purge": {"state": "ready", "header": "tenant=canary-header"},
    }
    with site_of(url, grants=Access.WRITE) as site:
        client = site.program()
        found = [client.get(f"/queues/orders/{path}").status_code for path in searches]
        written = [client.post(f"/queues/orders/{path}", data=form).status_code for path, form in forms.items()]

    assert found == [403, 403, 403, 200]
    assert written == [403, 403, 403]
    assert (admin.count("orders", "dead"), admin.count("orders", "ready")) == (1, 1)


#: Address -> the status of its page.
NOTHING = {
    "/queues/orders/message?id=%3Cscript%3Ealert(1)%3C/script%3E": 404,
    "/queues/%3Cscript%3E": 404,
    "/queues/none": 404,
    "/queues/orders/messages/everywhere": 404,
    "/queues/orders/messages/ready?after=nonsense": 404,
    "/queues/orders?layout=nonsense": 404,
    "/queues/orders/dead?older=nonsense": 404,
    "/queues/orders/periodic?name=%3Cscript%3Ealert(1)%3C/script%3E": 404,
    "/progress/none": 404,
    "/?" + "a=b&" * 2000: 400,
}
#: Form -> the status of its response.
NONSENSE = [
    ("/queues/none/pause", {}, 404),
    ("/queues/none/check", {}, 404),
    ("/queues/orders/pause", {"for_": "soon"}, 400),
    ("/queues/orders/pause", {"reason": "two\nlines"}, 400),
    ("/queues/orders/purge", {"state": "ended"}, 400),
    ("/queues/orders/redrive", {"rate": "fast"}, 400),
    ("/queues/orders/redrive", {"rate": "0"}, 400),
    ("/queues/orders/redrive", {"limit": "0"}, 400),
    ("/queues/orders/reschedule", {"id": "", "delay": "1h"}, 400),
    ("/queues/orders/pause_cron", {"name": "<b>"}, 400),
    ("/queues/orders/resume_cron", {}, 400),
    ("/queues/orders/pause", {"reason": "x" * 70_000}, 413),
]


def test_missing_things_have_an_error_page(orders, entry, site):
    entry("daily")
    answers = {path: site.program().get(path) for path in NOTHING}

    assert {path: answer.status_code for path, answer in answers.items()} == NOTHING
    assert [path for path, answer in answers.items() if "<h1>" not in answer.text] == []
    assert [path for path, answer in answers.items() if "<script>alert" in answer.text] == []


def test_invalid_form_is_refused_and_changes_nothing(orders, entry, site):
    entry("daily")
    before, program = orders.counts(), site.program()
    seen = [(path, form, program.post(path, data=form).status_code) for path, form, _ in NONSENSE]

    assert seen == NONSENSE
    assert orders.counts() == before
    assert site.program().post("/queues/orders/pause", json={"reason": "x"}).status_code == 415
