"""The pages in a real Chromium: wide and narrow, light and dark, with and without JavaScript."""

import importlib.resources
import itertools
import re

import httpx
import pytest
from browsing import DEAD, LONG_ID, publish_seven, queues, served, worker_of
from chromium import FAR_HOST, chromium
from ports import free_port
from required import module_of_ci
from site_page import TOKEN, site_of
from waiting import eventually

from reliq.admin import session
from reliq.embedded import EmbeddedRedis
from reliq.web import Access, application

expect = module_of_ci("playwright.sync_api").expect
WIDTHS, SCHEMES = (1440, 390), ("light", "dark")
SCRIPT = ("with", "without")
#: Groups of axe's rules, and single ones, by where they are tried: what a narrow or a dark page can have worse than a
#: wide and light one is its contrast, and what does not fit.
RULES = {
    (1440, "light"): ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    (390, "dark"): ["color-contrast", "scrollable-region-focusable", "target-size"],
}
#: Every page: its address, and texts that it must show.
PAGES = {
    "queues": ("/", ["payments", "invoices", "nobody works on it", "paused: we move", "All 4 queues"]),
    "queue": ("/queues/payments", ["payments", "What runs now", "Pause …"]),
    "unwatched": ("/queues/invoices", ["Nobody works on this queue"]),
    "paused": ("/queues/reports", ["Paused", "we move", "Resume reports"]),
    "messages": ("/queues/payments/messages/pending?bodies=1", ['{"fails":false}', "in 5"]),
    "keys": ("/queues/invoices/keys", ["tenant-7", LONG_ID, "in turn for a worker", "Pause the key", "At once in all"]),
    "waiting": ("/queues/invoices/messages/waiting?key=tenant-7", ["invoices: waiting, key tenant-7"]),
    "none": ("/queues/thumbnails/messages/ready", ["No message is ready."]),
    "message": (
        f"/queues/payments/message?id={LONG_ID}&bodies=1",
        [LONG_ID, "dead letter", "CANARY", "tenant", "acme"],
    ),
    "hidden": ("/queues/payments/message?id=dead-3", ["dead-3", "Not shown until you ask"]),
    "dead": ("/queues/payments/dead", ["Why they died", "ValueError at", "Looked at 8 of 8", "dead-6", LONG_ID]),
    "workers": ("/workers", ["payments", "What they run"]),
    "worker": ("/workers/{worker}", ["Where its handlers stand", "queues.<locals>.pay", "Ask for the stacks"]),
    "periodic": ("/periodic", ["nightly-settlement", "0 6 * * * Europe/Berlin", "paused: we move", "never"]),
    "entry": (
        "/queues/payments/periodic?name=hourly-check",
        ["every 3600", "by ada", "Run now", "Resume hourly-check"],
    ),
    "account": ("/account", ["Nothing is missing.", "balanced"]),
    "doctor": ("/doctor", ["version"]),
    "works": ("/progress", ["Under way, and done lately"]),
    "missing": ("/queues/no-such-queue", ["To the queues"]),
}


@pytest.fixture(scope="module")
def redis_url(redis_server):
    """The shared server's, emptied."""
    from redis import Redis

    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="module")
def admin(redis_url):
    with queues(redis_url) as admin:
        yield admin


@pytest.fixture(scope="module")
def address(redis_url, admin):
    with served(redis_url) as address:
        yield address


@pytest.fixture(scope="module")
def paths(admin):
    """The path of each page."""
    return {name: path.format(worker=worker_of(admin)) for name, (path, _) in PAGES.items()}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def windows(browser):
    """A window `with` JavaScript, and one `without`."""
    return {script: browser.new_context(java_script_enabled=script == "with").new_page() for script in SCRIPT}


@pytest.fixture
def window(windows):
    page = windows["with"]
    look(page, 1440, "light")
    yield page
    page.goto("about:blank")  # it leaves the stream


def look(page, width, scheme):
    """Look at a page through a window of that width, in that colour scheme."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # colours change at once


def opened(page, address):
    """Open a page; return what its console complained of."""
    complaints = []

    def note(message):
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def failed(error):
        complaints.append(str(error))

    page.on("console", note)
    page.on("pageerror", failed)
    page.goto(address)
    page.remove_listener("console", note)
    page.remove_listener("pageerror", failed)
    return complaints


def overflow(page):
    """By how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("script", SCRIPT)
def test_a_page_shows_its_values_fits_is_accessible_and_complains_of_nothing(windows, address, paths, name, script):
    page, texts = windows[script], PAGES[name][1]

    complaints = opened(page, address + paths[name])

    assert [one for one in complaints if name != "missing"] == []
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        look(page, width, scheme)
        seen = page.locator("body").inner_text()
        assert [text for text in texts if text not in seen] == []
        assert (width, scheme, overflow(page)) == (width, scheme, 0)
        if script == "with" and (width, scheme) in RULES:
            assert (width, scheme, serious(page, RULES[width, scheme])) == (width, scheme, [])


def serious(page, rules):
    """What axe finds on a page: each rule that is broken, and where."""
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


def test_the_table_of_queues_has_the_numbers_of_redis(window, address):
    window.goto(address)

    for queue, label, number in (
        ("payments", "pending", "30"),
        ("payments", "unack", "2"),
        ("payments", "dead", str(len(DEAD))),
        ("invoices", "ready", "72 by key"),  # 7, and 2 in lines
        ("reports", "ready", "7"),
        ("invoices", "workers", "none"),
        ("thumbnails", "ready", "0"),
    ):
        expect(cell(window, queue, label)).to_have_text(number)
    expect(window.locator("tfoot [data-label=pending]")).to_have_text("30")
    assert window.locator("tr.bad th a").all_inner_texts() == ["invoices", "reports"]


def test_numbers_change_without_a_reload_and_the_focus_stays(window, address, redis_url):
    window.goto(address)
    expect(window.locator("#live")).to_have_text("live")
    window.locator("th a", has_text="invoices").focus()

    publish_seven(redis_url, "growing")

    expect(cell(window, "growing", "ready")).to_have_text("7", timeout=60_000)
    assert window.evaluate("document.activeElement.textContent") == "invoices"


def test_a_person_can_stop_the_updates(window, address):
    window.goto(address)
    live = window.locator("#live")
    expect(live).to_have_text("live")

    live.click()
    expect(live).to_have_text("stopped")
    live.click()

    expect(live).to_have_text("live")


def test_slash_goes_to_the_search_and_j_and_k_through_the_rows(window, address):
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


def test_the_first_tab_leads_past_the_head(window, address):
    window.goto(address)
    window.keyboard.press("Tab")
    assert window.evaluate("document.activeElement.textContent") == "Skip to the content"
    window.keyboard.press("Enter")
    window.keyboard.press("Tab")
    assert window.evaluate("document.getElementById('main').contains(document.activeElement)")


@pytest.mark.parametrize("script", SCRIPT)
def test_a_queue_is_paused_and_resumed_by_forms(windows, address, script):
    page = windows[script]
    page.goto(address + "/queues/thumbnails")
    page.get_by_label("Why it is paused").fill("<b>for lunch</b>")
    page.get_by_role("button", name="Pause", exact=True).click()

    expect(page.locator(".note.warn")).to_contain_text("Paused by ada")
    expect(page.locator(".note.warn")).to_contain_text("<b>for lunch</b>")

    page.get_by_role("button", name="Resume thumbnails").click()
    expect(page.locator(".note.warn")).to_have_count(0)


@pytest.mark.parametrize("script", SCRIPT)
def test_a_periodic_entry_is_paused_and_resumed_by_forms(windows, address, script):
    page = windows[script]
    page.goto(address + "/periodic")
    page.get_by_role("link", name="nightly-settlement").click()
    page.get_by_label("Why it is paused").fill("the bank is closed")
    page.get_by_role("button", name="Pause", exact=True).click()

    expect(page.locator(".facts")).to_contain_text("by ada")
    expect(page.locator(".mark.warn")).to_have_text("paused: the bank is closed")

    page.get_by_role("button", name="Resume nightly-settlement").click()
    expect(page.locator(".mark.warn")).to_have_count(0)


def test_a_message_is_found_by_its_id(windows, address):
    page = windows["without"]
    page.goto(address + "/queues/payments")
    page.locator("#find").fill("dead-2")
    page.get_by_role("button", name="Find").click()

    expect(page.locator("h1")).to_have_text("dead-2")
    expect(page.locator(".story li").last).to_contain_text("became a dead letter")


def test_what_a_worker_runs_comes_within_a_beat_of_its_record(window, address):
    window.goto(address + "/workers")

    expect(window.locator("tbody [data-label='slots busy']")).to_contain_text("2 of 4", timeout=60_000)
    expect(window.locator("tbody [data-label=queue]")).to_have_text(["payments", "payments"])
    window.goto(address)
    expect(cell(window, "payments", "workers")).to_contain_text("1 worker")
    expect(cell(window, "payments", "workers")).to_contain_text("2 of 4 busy")


@pytest.mark.parametrize("script", SCRIPT)
def test_dead_letters_of_a_group_are_published_again_with_a_rate_and_their_progress_is_seen(
    windows, address, admin, script
):
    page = windows[script]
    eventually(lambda: admin.size("payments", "dead") == len(DEAD), "what was published again has died again")
    page.goto(address + "/queues/payments/dead")
    page.locator("tbody th a").first.click()
    page.get_by_label("At most, a second").fill("1000")
    page.get_by_role("button", name="Redrive").click()

    expect(page.locator("h1")).to_contain_text("payments")
    for _ in range(100):
        if script == "with" or page.locator(".mark", has_text="finished").count():
            break
        page.reload()
    expect(page.locator(".mark", has_text="finished")).to_be_visible(timeout=60_000)
    expect(page.locator(".facts")).to_contain_text(f"{len(DEAD)} redriven")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()


def test_a_reader_gets_no_body_and_no_form_that_writes(window, redis_url, paths):
    with served(redis_url, Access.READ) as elsewhere, httpx.Client(base_url=elsewhere) as program:
        for path in paths.values():
            html = program.get(path).text
            assert "CANARY" not in html
            assert [form for form in re.findall(r'method="post" action="([^"]*)"', html) if "/check" not in form] == []
        window.goto(elsewhere)
        expect(window.locator(".about")).to_contain_text("read-only")
        window.goto("about:blank")  # it leaves the stream


@pytest.fixture(scope="module")
def guarded(redis_url):
    """A page that wants a token."""
    with site_of(redis_url) as site:
        yield site


@pytest.mark.parametrize("script", SCRIPT)
def test_a_person_logs_in_with_the_token_and_out(windows, guarded, script):
    page = windows[script]
    page.goto(guarded.url)
    page.get_by_label("Token").fill("not the token, but as long")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("That is not the token")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()

    expect(page.locator("h1")).to_have_text("Queues")
    page.get_by_role("button", name="Log out").click()
    expect(page.locator("h1")).to_have_text("Log in")


def test_login_and_forms_work_over_plain_http_under_a_host_name(browser, redis_url, admin):
    """Off this machine a browser sends no Sec-Fetch-Site over plain HTTP: only Origin says that a form is our own."""
    sent = []
    with site_of(redis_url, hosts=[FAR_HOST]) as site, browser.new_context() as context:
        page = context.new_page()
        page.on("request", lambda request: sent.append(request.all_headers()) if request.method == "POST" else None)
        page.goto(site.url.replace("127.0.0.1", FAR_HOST))
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("link", name="thumbnails").click()
        page.get_by_label("Why it is paused").fill("for lunch")
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator(".note.warn")).to_contain_text("Paused by alice")
        page.get_by_role("button", name="Resume thumbnails").click()
        expect(page.locator(".note.warn")).to_have_count(0)
        page.goto("about:blank")

    assert len(sent) == 3
    assert all("sec-fetch-site" not in headers for headers in sent)


def test_a_page_says_that_redis_is_away_and_comes_back_by_itself(window, server_path, monkeypatch):
    monkeypatch.setattr(application, "RETRY_SECONDS", 1)
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.2)
    with EmbeddedRedis(server=server_path, port=free_port()) as server:
        publish_seven(server.url, "orders")
        with served(server.url) as address:
            page = window
            page.goto(address)
            expect(page.locator("#live")).to_have_text("live")
            server.kill()
            expect(page.locator("#live.away")).to_contain_text("stands still", timeout=30_000)
            expect(cell(page, "orders", "ready")).to_have_text("7")

            page.goto(address)
            expect(page.locator("body")).to_contain_text("503")
            server.start()
            expect(page.locator("h1")).to_have_text("Queues", timeout=30_000)
            page.goto("about:blank")
