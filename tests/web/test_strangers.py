"""Strangers at the web pages: many connections, foreign host names, forged addresses, guesses, spoilt data."""

import logging
import socket
from contextlib import ExitStack, suppress

import pytest
from site_page import BEARER, EVERYTHING, TOKEN, serving, site_of
from waiting import eventually

from reliq.web import Access, app, serve


@pytest.fixture
def connect():
    """Return a function that connects to a site and sends bytes; the test closes the connections at its end."""
    with ExitStack() as stack:

        def to(site, sent=b""):
            address = ("127.0.0.1", int(site.url.rpartition(":")[2]))
            one = stack.enter_context(socket.create_connection(address, timeout=60))
            with suppress(ConnectionError):  # it may already be closed
                one.sendall(sent)
            return one

        yield to


def read_to_the_end(connection):
    """Read until the server closes the connection; raise TimeoutError if it stays open."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def test_page_with_many_silent_connections_still_answers(url, connect, monkeypatch):
    monkeypatch.setattr(serve, "CONNECTIONS_LIMIT", 8)
    with site_of(url) as site:
        silent = [connect(site, b"GET / HTTP/1.1\r\n") for _ in range(30)]

        assert [site.client().get("/health").status_code for _ in range(3)] == [200] * 3
        read_to_the_end(silent[0])  # the server closed the oldest connection


@pytest.mark.parametrize(
    ("whole", "part"),
    [(b"", b""), (b"", b"GET / HTTP/1.1\r\nX: "), (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET ")],
    ids=["nothing", "a part", "a part of the second"],
)
def test_connection_that_sends_no_whole_head_is_cut_off(url, connect, monkeypatch, whole, part):
    with site_of(url) as site:
        if whole:
            slow, answer = connect(site, whole), b""
            while not answer.endswith(b"ok\n"):
                answer += slow.recv(4096)
        monkeypatch.setattr(serve, "HEADER_SECONDS", 0.2)
        if not whole:
            slow = connect(site)
        with suppress(ConnectionError):  # it may already be closed
            slow.sendall(part)
        read_to_the_end(slow)


def test_client_that_reads_no_answers_is_cut_off(url, connect, monkeypatch):
    monkeypatch.setattr(serve, "HEADER_SECONDS", 0.2)
    with site_of(url) as site:
        deaf = connect(site)
        with suppress(ConnectionError):
            while True:  # until the server resets the connection
                deaf.sendall(b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)


def test_form_that_never_ends_is_refused(url, connect, monkeypatch):
    monkeypatch.setattr("reliq.web.application.FORM_SECONDS", 0.2)
    head = "POST /login HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 99\r\n\r\ntoken="
    with site_of(url) as site:
        assert b"408" in connect(site, head.encode()).recv(4096)


def test_server_limits_the_lines_of_its_libraries(url, caplog):
    with serving(app(url, token=TOKEN)):
        for name in ("asyncio", "uvicorn.error"):
            for _ in range(30):
                logging.getLogger(name).error("accept failed")

    assert 2 <= caplog.text.count("accept failed") <= 25


def test_page_answers_under_known_host_names_alone(url):
    known = ("localhost:9470", "127.0.0.1", "[::1]:9470", "ops.example.com", "OPS.example.com.:443")
    foreign = ("evil.test:9470", "127.0.0.1.evil.test", "ops.example.com.evil.test", "")
    page = app(url, access=lambda _request: Access.READ, hosts=["ops.example.com"])
    with serving(page) as site:
        client = site.client()
        seen = {
            host: tuple(client.get(path, headers={"Host": host}).status_code for path in ("/", "/health"))
            for host in (*known, *foreign)
        }

    assert seen == dict.fromkeys(known, (200, 200)) | dict.fromkeys(foreign, (400, 200))


@pytest.mark.parametrize(
    ("proxy", "forwarded", "logged"),
    [
        pytest.param(None, "192.0.2.7", "127.0.0.1", id="no proxy"),
        pytest.param("127.0.0.1", "198.51.100.9, 192.0.2.7", "192.0.2.7", id="the named proxy"),
        pytest.param("127.0.0.1", "1.2.3.4 at nowhere", "an unknown address", id="forged"),
        pytest.param("203.0.113.5", "192.0.2.7", "127.0.0.1", id="another proxy"),
    ],
)
def test_forwarded_address_counts_from_the_named_proxy_alone(url, caplog, proxy, forwarded, logged):
    caplog.set_level(logging.INFO, "reliq")
    with serving(app(url, token=TOKEN, grants=EVERYTHING), proxy=proxy) as site:
        site.client(X_Forwarded_For=forwarded, Sec_Fetch_Site="same-origin").post("/login", data={"token": TOKEN})

    assert f"login from {logged}" in caplog.text


def test_failed_logins_are_delayed_and_logged_within_a_limit(url, caplog, monkeypatch):
    delays = []

    async def sleep(seconds):
        delays.append(seconds)

    monkeypatch.setattr("reliq.web.application.sleep", sleep)
    with site_of(url) as site:
        browser = site.client(Sec_Fetch_Site="same-origin")
        answers = [browser.post("/login", data={"token": f"guess {n}"}).status_code for n in range(30)]

    assert answers == [401] * 30
    assert delays == [1.0] * 30
    assert 1 <= caplog.text.count("failed login from 127.0.0.1") <= 22


def test_page_of_spoilt_data_says_so(client, orders, site, caplog):
    client.set(orders.keys.map, b"x")

    answer = site.client(**BEARER).get("/queues/orders")

    assert answer.status_code == 503
    assert "orders" in answer.text
    assert "Traceback" not in caplog.text


def test_checks_of_readers_leave_room_for_writes(url, orders, monkeypatch):
    held = []
    monkeypatch.setattr("reliq.web.actions.BackgroundTask.run", lambda *run: held.append(run))  # no task ever ends
    rights = {"alice": Access.READ, "carol": Access.WRITE}

    def access(request):
        who = request.headers["x-user"]
        return rights[who].by(who)

    def post(who, path):
        return site.client(X_User=who, Sec_Fetch_Site="same-origin").post(path)

    with serving(app(url, access=access)) as site:
        checks = [post("alice", "/queues/orders/check") for _ in range(4)]
        eventually(lambda: len(held) >= 2, "two checks run")
        write = post("carol", "/queues/orders/redrive")
        stopped = post("alice", checks[0].headers["location"].partition("?")[0] + "/stop")
        refused = post("alice", write.headers["location"].partition("?")[0] + "/stop")

    assert [one.status_code for one in checks] == [303, 303, 429, 429]
    assert (write.status_code, stopped.status_code, refused.status_code) == (303, 303, 403)
