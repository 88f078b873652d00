"""Access rights at every address, with every way of authentication."""

import asyncio
import logging

import httpx
import pytest
from site_page import BEARER, EVERYTHING, TOKEN, serving

from reliq import ConfigurationError, RedisRefusedError
from reliq.web import Access, app
from reliq.web.access import HEADERS, LOGIN_SECONDS, Token
from reliq.web.application import OTHERS, PAGES

FOREIGN = {"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"}
OURS = {"Sec-Fetch-Site": "same-origin"}


def asked(client, page, **headers):
    """Request an address; fill in all fields of its form."""
    path = page.path.format(queue="orders", state="ready", id="none")
    said = {"id": "x", "state": "ready", "delay": "1h", "name": "daily", "key": "tenant"}
    data = {"data": said} if page.method == "POST" else {"params": {"id": "x", "name": "daily"}}
    return client.request(page.method, path, headers=headers, **data)


@pytest.fixture
def levels(url):
    """A page that takes the access level from a header, which no real resolver does."""
    with serving(app(url, token=TOKEN, access=lambda request: Access[request.headers.get("x-level", "NONE")])) as site:
        yield site


def test_every_address_checks_identity_rights_and_origin(orders, levels):
    client = levels.client(**OURS)
    seen = {}
    for page in PAGES:
        unknown = asked(client, page).status_code
        wrong = asked(client, page, Authorization="Bearer wrong").status_code
        refused = {asked(client, page, **{"X-Level": level}).status_code for level in ("READ", "BODIES")}
        seen[page.name] = (unknown, wrong, refused if page.needs is Access.WRITE else 403 in refused)
    before = orders.counts()
    foreign = {page.name: asked(client, page, **FOREIGN, **{"X-Level": "WRITE"}).status_code for page in PAGES}

    assert seen == {page.name: (401, 401, {403} if page.needs is Access.WRITE else False) for page in PAGES}
    assert {name for name, status in foreign.items() if status == 403} == {
        page.name for page in PAGES if page.method == "POST"
    }
    assert (orders.counts(), orders.counts().paused) == (before, False)


def test_every_address_works_for_a_visitor_with_all_rights(orders, levels, alive, entry):
    alive("none")
    entry("daily")
    orders.schedule("daily", every=3600, body={})
    client = levels.client(**OURS, X_Level="WRITE")
    statuses = {page.name: asked(client, page).status_code for page in PAGES}

    assert statuses == {page.name: 200 if page.method == "GET" else 303 for page in PAGES} | {"task": 404}
    assert orders.counts().paused is False  # it was resumed


def test_no_address_outside_the_table_is_open(levels):
    client = levels.client()
    others = {name: client.get(path.replace("{path:path}", "reliq.css")).status_code for name, path in OTHERS.items()}

    assert others == {"login": 200, "enter": 401, "logout": 405, "health": 200, "static": 200}
    assert client.get("/nothing").status_code == 404
    assert client.get("/static/../pages.py").status_code == 404


def test_every_answer_even_an_error_has_the_security_headers(orders, levels):
    client = levels.client(X_Level="READ")
    paths = ("/", "/nothing", "/queues/none", "/static/reliq.css", "/static/none", "/login")
    answers = [client.get(path) for path in paths]
    answers += [client.post("/queues/orders/pause"), client.put("/"), client.get("/", headers={"X-Level": "NO"})]

    assert [one.status_code for one in answers] == [200, 404, 404, 200, 404, 200, 403, 405, 500]
    assert [{name: one.headers.get(name) for name in HEADERS} for one in answers] == [HEADERS] * len(answers)
    kept = "public, max-age=31536000, immutable"
    assert [one.headers["cache-control"] for one in answers] == [
        kept if one is answers[3] else "no-store" for one in answers
    ]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_web_socket_is_refused(url):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app(url, token=TOKEN)({"type": "websocket"}, None, send))

    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_token_is_accepted_in_the_header_alone(orders, site):
    client = site.client()

    assert client.get("/", headers=BEARER).status_code == 200
    assert client.get("/", params={"token": TOKEN}).status_code == 401
    assert client.get(f"/enter/{TOKEN}").status_code == 401
    assert client.get("/", headers={"Authorization": f"Basic {TOKEN}"}).status_code == 401
    assert client.get("/", headers={"Cookie": f"{site.app.token.cookie}={TOKEN}"}).status_code == 401
    assert client.get("/").headers["www-authenticate"] == "Bearer"


def test_printed_address_lets_in_one_person_who_presses_its_button(site):
    path, client = f"/enter/{site.app.token.once()}", site.client()
    preview = client.get(path, headers={"Sec-Purpose": "prefetch"})
    looked = client.head(path)  # chat programs send HEAD to preview a link
    foreign, person, again = (client.post(path, headers=one) for one in (FOREIGN, OURS, OURS))

    assert [one.status_code for one in (preview, looked, foreign, person, again)] == [200, 401, 403, 303, 401]
    assert path in preview.text
    assert [answer for answer in (preview, looked, foreign, again) if "set-cookie" in answer.headers] == []
    cookie = person.headers["set-cookie"].lower()
    assert [part for part in ("httponly", "samesite=strict", "path=/;") if part not in cookie] == []
    assert "secure" not in cookie
    assert TOKEN not in cookie


def test_login_behind_a_tls_proxy_gets_a_secure_cookie(url):
    with serving(app(url, token=TOKEN), proxy="127.0.0.1") as site:
        answer = site.client(X_Forwarded_Proto="https", **OURS).post("/login", data={"token": TOKEN})

    assert "; secure" in answer.headers["set-cookie"].lower()


def test_person_logs_in_with_the_token_and_out_again(site):
    client = site.client(**OURS)

    assert client.post("/login", data={"token": "another token of that length"}).status_code == 401
    assert client.post("/login", data={"token": TOKEN}, headers=FOREIGN).status_code == 403
    assert client.post("/login", data={"token": TOKEN}).status_code == 303
    kept = httpx.Cookies(client.cookies)
    assert client.get("/").status_code == 200
    assert client.post("/logout").headers["location"] == "/login"
    assert client.get("/").status_code == 401
    copied = httpx.get(f"{site.url}/", cookies=kept, timeout=60)
    assert copied.status_code == 401


def test_cookie_expires_and_cannot_be_extended_and_logout_ends_it_alone():
    token = Token(TOKEN)
    ada, bob, carl = (token.login(1000.0) for _ in range(3))
    until, _, rest = carl.partition(".")
    forged = (f"{int(until) + 1}.{rest}", "", ".", "x", "..", "\xe4.a.b", carl + "x")
    token.logout(ada, 1000.0)
    token.logout(bob, 1001.0)

    assert [token.is_login(one, 1002.0) for one in (ada, bob, carl)] == [False, False, True]
    assert [token.is_login(carl, 1000.0 + age) for age in (LOGIN_SECONDS - 1, LOGIN_SECONDS)] == [True, False]
    # Another process with the same token, and a process with another token.
    assert [Token(text).is_login(carl, 1000.0) for text in (TOKEN, TOKEN + "!")] == [True, False]
    assert [one for one in forged if token.is_login(one, 1000.0)] == []


#: Headers of a browser about the origin of a form -> the status of the response.
ORIGINS = [
    ({"Sec-Fetch-Site": "same-origin"}, 303),
    ({"Sec-Fetch-Site": "same-origin", "Origin": "https://before-a-proxy.example"}, 303),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "none"}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": ""}, 403),
    ({"Origin": "http://[::1"}, 403),
    ({"Origin": "://"}, 403),
    ({}, 403),
]


def test_form_of_another_site_changes_nothing(orders, site):
    client = site.browser()
    client.headers.pop("Sec-Fetch-Site")
    expected = [*ORIGINS, ({"Origin": site.url}, 303), (BEARER, 303), (BEARER | FOREIGN, 403)]
    seen, paused = [], []
    for headers, _ in expected:
        orders.resume()
        seen.append((headers, client.post("/queues/orders/pause", headers=headers).status_code))
        paused.append(orders.counts().paused)

    assert seen == expected
    assert paused == [status == 303 for _, status in expected]


def test_every_write_names_its_visitor_in_the_log_and_in_redis(url, orders, admin, caplog):
    async def resolver(_request):
        return EVERYTHING.by("carol")

    caplog.set_level(logging.INFO, "reliq")
    with serving(app(url, access=resolver)) as site:
        client = site.client(**OURS)
        client.post("/queues/orders/pause", data={"reason": "the gateway is away"})
        client.post("/queues/orders/cancel", data={"id": "x"})

    assert admin.paused("orders").by == "carol"
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("reliq.web")]
    assert lines == [
        "web: carol at 127.0.0.1: pause orders reason='the gateway is away'",
        "web: carol at 127.0.0.1: cancel orders x (cancelled)",
    ]


def test_resolver_that_fails_or_returns_nonsense_lets_nobody_in(url, caplog):
    raised = [RuntimeError("a secret of the resolver"), ConfigurationError("a secret"), RedisRefusedError("a secret")]
    answers = iter([*raised, "READ", None, *[KeyError("a secret")] * 25])

    def resolver(_request):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with serving(app(url, access=resolver)) as site:
        client = site.client()
        pages = [client.get("/") for _ in range(30)]

    assert [page.status_code for page in pages] == [500] * 30
    assert "secret" not in "".join(page.text for page in pages) + caplog.text
    assert "access resolver failed, so the visitor is refused: RuntimeError at test_access.py" in caplog.text
    assert caplog.text.count("access resolver failed") <= 22  # of 30: the log is limited
    assert "Traceback" not in caplog.text


def test_page_without_access_control_is_refused(url):
    with pytest.raises(ConfigurationError, match="set who may see the page"):
        app(url)
    with pytest.raises(ConfigurationError, match="at least 16 characters"):
        app(url, token="short")
