"""The pages in a real Chromium: wide and narrow, light and dark, with and without JavaScript."""

import importlib.resources
import itertools
import re

import httpx
import pytest
from browsing import DEAD, LONG_ID, publish_seven, queues, served, worker_of
from chromium import FAR_HOST, chromium
from ports import free_port
from redis import Redis
from required import module_of_ci
from site_page import TOKEN, site_of
from waiting import eventually

from reliq.admin import Admin
from reliq.redis import session
from reliq.testing.server import EmbeddedRedis
from reliq.web import Access

pytestmark = pytest.mark.slow
module_of_ci("playwright")
WIDTHS, SCHEMES = (1440, 390), ("light", "dark")
SCRIPTS = {"script": True, "no-script": False}
#: Timeout for busy machines; only a failing test waits this long.
PATIENCE_MS = 100_000
#: Messages in the browser's console and JavaScript errors.
COMPLAINTS = []
#: Rules and groups of rules of axe, by kind of page: compared to a wide light page, a narrow or dark page can only
#: fail in contrast and overflow.
RULES = {
    (1440, "light"): ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    (390, "dark"): ["color-contrast", "scrollable-region-focusable", "target-size"],
}
#: Every page: its address, and texts that it must contain.
PAGES = {
    "queues": ("/", ["payments", "invoices", "no worker", "paused: we move", "1 worker", "2 of 4 busy"]),
    "queue": ("/queues/payments", ["payments", "Running now", "Pause …"]),
    "unwatched": ("/queues/invoices", ["No worker serves this queue"]),
    "paused": ("/queues/reports", ["Paused", "we move", "Resume reports"]),
    "messages": ("/queues/payments/messages/pending?bodies=1", ['{"fails":false}', "in 1h"]),
    "keys": ("/queues/invoices/keys", ["tenant-7", LONG_ID, "in turn for a worker", "Pause the key", "At once in all"]),
    "waiting": ("/queues/invoices/messages/waiting?key=tenant-7", ["invoices: waiting, key tenant-7"]),
    "none": ("/queues/thumbnails/messages/ready", ["No message is ready."]),
    "message": (
        f"/queues/payments/message?id={LONG_ID}&bodies=1",
        [LONG_ID, "dead letter", "CANARY", "tenant", "acme"],
    ),
    "hidden": ("/queues/payments/message?id=dead-3", ["dead-3", "Not shown until you ask"]),
    "dead": ("/queues/payments/dead", ["Why they died", "ValueError at", "Looked at 8 of 8", "dead-6", LONG_ID]),
    "workers": ("/workers", ["payments", "Running messages", "2 of 4"]),
    "worker": ("/workers/{worker}", ["Stacks of its handlers", "queues.<locals>.pay", "Ask for the stacks"]),
    "periodic": ("/periodic", ["nightly-settlement", "0 6 29 2 * Europe/Berlin", "paused: we move", "never"]),
    "entry": (
        "/queues/payments/periodic?name=quarterly-check",
        ["every 7776000", "by ada", "Run now", "Resume quarterly-check"],
    ),
    "account": ("/account", ["Nothing is missing.", "balanced"]),
    "doctor": ("/doctor", ["version"]),
    "tasks": ("/progress", ["Under way, and finished lately"]),
    "missing": ("/queues/no-such-queue", ["To the queues"]),
}


def expect(locator):
    """Return playwright's `expect`; imported here because playwright is large and few tests need it."""
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    return expect(locator)


@pytest.fixture(scope="module")
def redis_url(redis_server):
    """Return the URL of the shared Redis, emptied and filled with the queues."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    with queues(redis_server.url):
        yield redis_server.url


@pytest.fixture(scope="module")
def address(redis_url):
    with served(redis_url) as address:
        yield address


@pytest.fixture(scope="module")
def paths(redis_url):
    """Return the path of each page."""
    worker = worker_of(redis_url)
    return {name: path.format(worker=worker) for name, (path, _) in PAGES.items()}


@pytest.fixture(scope="module")
def windows():
    """Return a window with JavaScript, and a window without."""
    with chromium() as browser:
        windows = {name: browser.new_page(java_script_enabled=enabled) for name, enabled in SCRIPTS.items()}
        for window in windows.values():
            window.set_default_timeout(PATIENCE_MS)
            window.on("console", lambda said: said.type in ("error", "warning") and COMPLAINTS.append(said.text))
            window.on("pageerror", lambda error: COMPLAINTS.append(str(error)))
        yield windows


@pytest.fixture
def window(windows):
    page = windows["script"]
    look(page, 1440, "light")
    yield page
    page.goto("about:blank")  # stops its polling


def look(page, width, scheme):
    """Open a page in a window of this width and colour scheme."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no animated colour changes


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_page_shows_its_values_fits_and_is_accessible(windows, address, paths, name, script):
    page, texts = windows[script], PAGES[name][1]

    COMPLAINTS.clear()
    page.goto(address + paths[name])

    assert name == "missing" or COMPLAINTS == []
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        look(page, width, scheme)
        seen = page.locator("body").inner_text()
        assert [text for text in texts if text not in seen] == []
        too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert (width, scheme, too_wide) == (width, scheme, 0)
        if script == "script" and (width, scheme) in RULES:
            assert (width, scheme, serious(page, RULES[width, scheme])) == (width, scheme, [])


def serious(page, rules):
    """Return the violations that axe finds on a page: rule and place."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found = page.evaluate("rules => axe.run(document, {resultTypes: ['violations'], runOnly: rules})", rules)
    return [
        (one["id"], [node["target"] for node in one["nodes"]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def cell(page, queue, label):
    row = page.locator("tbody tr", has=page.locator("th a", has_text=re.compile(f"^{queue}$")))
    return row.locator(f'[data-label="{label}"]')


def test_table_of_queues_has_the_numbers_of_redis(window, address):
    window.goto(address)

    for queue, label, number in (
        ("payments", "pending", "30"),
        ("payments", "unack", "2"),
        ("payments", "dead", str(len(DEAD))),
        ("invoices", "ready", "72 by key"),  # 7, and 2 in key queues
        ("reports", "ready", "7"),
        ("invoices", "workers", "none"),
        ("thumbnails", "ready", "0"),
    ):
        expect(cell(window, queue, label)).to_have_text(number)
    expect(window.locator("tfoot [data-label=pending]")).to_have_text("30")
    assert window.locator("tr.bad th a").all_inner_texts() == ["invoices", "reports"]


def test_live_page_keeps_the_focus_and_can_be_stopped(window, address, redis_url):
    window.goto(address)
    live = window.locator("#live")
    expect(live).to_have_text("live")
    window.locator("th a", has_text="invoices").focus()

    publish_seven(redis_url, "growing")

    expect(cell(window, "growing", "ready")).to_have_text("7")
    assert window.evaluate("document.activeElement.textContent") == "invoices"

    live.click()
    expect(live).to_have_text("stopped")
    live.click()
    expect(live).to_have_text("live")


def test_live_page_changes_without_a_reload_and_keeps_a_form_half_filled_in(window, address, redis_url):
    window.goto(address + "/queues/reports")
    window.evaluate("window.mark = 'not reloaded'")
    window.get_by_role("searchbox").fill("an id half ty")

    Admin(redis_url).publish("reports", b"{}", delay=86_400)

    expect(window.locator(".picture a", has_text="pending").locator(".count")).to_have_text("1")
    assert window.evaluate("window.mark") == "not reloaded"
    assert window.get_by_role("searchbox").input_value() == "an id half ty"
    assert window.evaluate("document.activeElement.id") == "find"


def test_hidden_page_asks_for_nothing_until_it_is_seen_again(windows, address):
    page, asked = windows["script"].context.browser.new_page(), []
    page.clock.install()
    page.add_init_script("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.goto(address)
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    while_hidden = [url for url in asked if "/static/" not in url]
    page.evaluate("delete document.hidden")
    with page.expect_request(f"{address}/", timeout=PATIENCE_MS):
        page.clock.run_for(2000)
    page.close()

    assert while_hidden == []


def test_keyboard_reaches_search_rows_and_content(window, address):
    window.goto(address + "/queues/payments")
    window.keyboard.press("/")
    assert window.evaluate("document.activeElement.id") == "find"

    window.goto(address)
    focused = []
    for key in "jjk":
        window.keyboard.press(key)
        focused.append(window.evaluate("document.activeElement.textContent"))
    rows = window.locator("tbody th a").all_inner_texts()
    assert focused == [rows[0], rows[1], rows[0]]

    window.goto(address)
    window.keyboard.press("Tab")
    assert window.evaluate("document.activeElement.textContent") == "Skip to the content"
    window.keyboard.press("Enter")
    window.keyboard.press("Tab")
    assert window.evaluate("document.getElementById('main').contains(document.activeElement)")


def press(page, button):
    page.get_by_role("button", name=button, exact=True).click()


def pause_and_resume(page, name, mark, text):
    """Follow a link, pause the queue or key of that page, check the mark, and resume."""
    page.get_by_role("link", name=name).click()
    page.get_by_label("Why it is paused").fill("<b>for lunch</b>")
    press(page, "Pause")
    expect(page.locator(mark)).to_contain_text(text)
    expect(page.locator(mark)).to_contain_text("<b>for lunch</b>")
    press(page, f"Resume {name}")
    expect(page.locator(mark)).to_have_count(0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_queue_and_periodic_job_are_paused_and_resumed_by_forms(windows, address, script):
    page = windows[script]
    page.goto(address)
    pause_and_resume(page, "thumbnails", ".note.warn", "Paused by ada")
    page.goto(address + "/periodic")
    pause_and_resume(page, "nightly-settlement", ".mark.warn", "paused: ")


def test_message_is_found_by_its_id(windows, address):
    page = windows["no-script"]
    page.goto(address + "/queues/payments")
    page.locator("#find").fill("dead-2")
    press(page, "Find")

    expect(page.locator("h1")).to_have_text("dead-2")
    expect(page.locator(".story li").last).to_contain_text("became a dead letter")


@pytest.mark.parametrize("script", SCRIPTS)
def test_group_of_dead_letters_is_redriven_and_its_progress_shown(windows, address, script):
    page = windows[script]

    def shows(path, text):
        page.goto(address + path) if path else page.reload()
        return page.get_by_text(text).count()

    # The worker moves the other case's redriven message to the dead letters again; the page's count may lag by 1 s.
    everything = f"Looked at {len(DEAD)} of {len(DEAD)}"
    eventually(lambda: shows("/queues/payments/dead", everything), "all letters are back")
    page.locator("tbody th a").first.click()
    page.get_by_label("At most, a second").fill("1000")
    press(page, "Redrive")

    expect(page.locator("h1")).to_contain_text("payments")
    if script == "no-script":
        eventually(lambda: shows("", "finished"), "the redrive ends")
    expect(page.locator(".mark", has_text="finished")).to_be_visible()
    expect(page.locator(".facts")).to_contain_text(f"{len(DEAD)} redriven")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()


def test_reader_gets_no_body_and_no_form_that_writes(window, redis_url, paths):
    with served(redis_url, Access.READ) as elsewhere, httpx.Client(base_url=elsewhere, timeout=60) as program:
        for path in paths.values():
            html = program.get(path).text
            assert "CANARY" not in html
            assert [form for form in re.findall(r'method="post" action="([^"]*)"', html) if "/check" not in form] == []
        window.goto(elsewhere)
        expect(window.locator(".about")).to_contain_text("read-only")
        window.goto("about:blank")  # the server ends


@pytest.mark.parametrize("host", ["127.0.0.1", FAR_HOST])
@pytest.mark.parametrize("script", SCRIPTS)
def test_person_logs_in_pauses_a_queue_and_logs_out(windows, redis_url, script, host):
    """Over plain HTTP to another machine, browsers send no Sec-Fetch-Site: only Origin proves that a form is ours."""
    page, requests = windows[script], []
    page.on("request", lambda request: requests.append(request))  # noqa: PLW0108  Playwright marks its listeners
    with site_of(redis_url, hosts=[FAR_HOST]) as site:
        page.goto(site.url.replace("127.0.0.1", host))
        page.get_by_label("Token").fill("not the token, but as long")
        press(page, "Log in")
        expect(page.get_by_role("alert")).to_contain_text("That is not the token")
        page.get_by_label("Token").fill(TOKEN)
        press(page, "Log in")
        expect(page.locator("h1")).to_have_text("Queues")
        pause_and_resume(page, "thumbnails", ".note.warn", "Paused by alice")
        press(page, "Log out")
        expect(page.locator("h1")).to_have_text("Log in")
    posts = [one.all_headers() for one in requests if one.method == "POST"]
    assert ["sec-fetch-site" in headers for headers in posts] == [host != FAR_HOST] * 5


def test_page_reports_an_outage_of_redis_and_recovers(window, server_path, monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.2)
    with EmbeddedRedis(server=server_path, port=free_port()) as server:
        publish_seven(server.url, "orders")
        with served(server.url) as address:
            window.goto(address)
            expect(window.locator("#live")).to_have_text("live")
            server.kill()
            expect(window.locator("#live.away")).to_contain_text("could not refresh: Redis does not answer")
            expect(cell(window, "orders", "ready")).to_have_text("7")
            server.start()
            expect(window.locator("#live")).to_have_text("live")
            publish_seven(server.url, "later")
            expect(cell(window, "later", "ready")).to_have_text("7")

            server.kill()
            expect(window.locator("#live.away")).to_contain_text("could not refresh")
            window.goto(address)
            expect(window.locator("body")).to_contain_text("503")
            server.start()
            expect(window.locator("h1")).to_have_text("Queues")
            window.goto("about:blank")
