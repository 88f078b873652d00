"""A worker's page shows its running messages, and its handlers' stacks on request of a user with write access."""

import html
import re

from site_page import EVERYTHING, site_of

from reliq.admin.calls import REQUEST_MS
from reliq.keys import stack_request_key, stacks_key, worker_key
from reliq.redis.commands import HandlerStack, StackReport, write_report

FRAME = "/srv/shop/<jobs>.py:31 pay.<locals>.charge"


def said_by(site):
    return html.unescape(site.program().get("/workers/w").raise_for_status().text)


def test_request_for_stacks_waits_for_the_worker_until_it_is_overdue(orders, alive, client, site, caplog):
    caplog.set_level("INFO", "reliq")
    alive("w")
    assert "No stacks were requested" in said_by(site)

    answer = site.browser().post("/workers/w/ask_stacks")

    assert (answer.status_code, answer.headers["location"]) == (303, "/workers/w?done=ask_stacks")
    assert "it answers within 5 seconds" in said_by(site)
    assert "web: alice at 127.0.0.1: ask_stacks w" in caplog.messages
    client.pexpire(stack_request_key("w"), REQUEST_MS - 11_000)
    assert re.search(r"No answer for 1\ds: a handler blocks the interpreter", said_by(site))


def test_stacks_are_shown_to_readers_too(orders, alive, client, site, lookers):
    alive("w")
    stacks = (HandlerStack("", "", ("/usr/lib/asyncio.py:1 run",)), HandlerStack("orders", "x<y", (FRAME,)))
    client.execute_command(*write_report("w", StackReport(1_795_336_800.0, stacks, 1)).command)

    assert f'\n<pre tabindex="0">{FRAME}' in said_by(site)
    assert "1 more handler not listed" in said_by(site)
    page = lookers.program().get("/workers/w").text
    assert html.escape(FRAME) in page
    assert FRAME not in page
    assert "/workers/w/ask_stacks" not in page
    assert lookers.browser().post("/workers/w/ask_stacks").status_code == 403


def test_silent_or_unknown_worker_has_an_error_page(orders, alive, client, site):
    alive("w")
    client.delete(worker_key("w"))

    assert "older than 15 seconds" in said_by(site)
    assert site.browser().post("/workers/w/ask_stacks").status_code == 400
    assert site.program().get("/workers/nobody").status_code == 404
    assert site.browser().post("/workers/nobody/ask_stacks").status_code == 400
    assert client.exists(stack_request_key("w"), stack_request_key("nobody"), stacks_key("w")) == 0


def test_pages_of_readers_need_only_the_redis_rights_of_a_viewer(orders, alive, admin, client, url):
    alive("w")
    rule = admin.acl(["viewer"], ["orders"], user="looks")
    client.execute_command("ACL", "SETUSER", "looks", "reset", *rule.rules, "on", ">secret")
    try:
        with site_of(url.replace("redis://", "redis://looks:secret@"), grants=EVERYTHING) as site:
            program = site.program()
            shown = ("", "/messages/ready?bodies=1", "/dead", "/message?id=x&bodies=1")
            paths = ["/", *(f"/queues/orders{path}" for path in shown), "/workers", "/workers/w", "/account", "/doctor"]
            looks = {path: program.get(path).status_code for path in paths}
            before = {key: client.dump(key) for key in client.scan_iter()}
            forms = ("/queues/orders/pause", "/queues/orders/cancel", "/workers/w/ask_stacks")
            writes = [program.post(form, data={"id": "x"}).status_code for form in forms]
    finally:
        client.acl_deluser("looks")

    assert looks == dict.fromkeys(paths, 200)
    assert writes == [503, 503, 503]
    assert {key: client.dump(key) for key in client.scan_iter()} == before
