"""The pages in a real Django project: its users sign in as usual and keep their permissions."""

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest
from django_shop import LOGIN, PASSWORD, PREFIX
from ports import free_port
from site_page import LINK, crawl
from waiting import eventually

from reliq import Queue

SHOP = Path(__file__).with_name("django_shop.py")
PAGE = f"{PREFIX}/queues/orders"


@pytest.fixture
def shop(tmp_path, url):
    """Return the address of the shop."""
    Queue("orders", dict, url=url).publish({"number": 1})
    port = free_port()
    with subprocess.Popen(
        [sys.executable, SHOP, str(port)], cwd=tmp_path, env={**os.environ, "RELIQ_URL": url}, stderr=subprocess.PIPE
    ) as process:
        try:
            eventually(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}"), "the shop serves")
            assert process.poll() is None, process.stderr.read().decode()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def answers(address):
    try:
        return httpx.get(f"{address}{PREFIX}/health").text == "ok\n"
    except httpx.TransportError:
        return False


@pytest.fixture
def sign_in(shop):
    """Open a page and sign in; return the browser and the address after the login."""
    with ExitStack() as stack:

        def enter(name):
            client = httpx.Client(base_url=shop, headers={"Sec-Fetch-Site": "same-origin"}, timeout=60)
            browser = stack.enter_context(client)
            sent = browser.get(PAGE)
            assert (sent.status_code, sent.headers["location"]) == (303, f"{LOGIN}?next={PAGE.replace('/', '%2F')}")
            form = browser.get(sent.headers["location"])
            fields = dict(re.findall(r'name="(csrfmiddlewaretoken|next)" value="([^"]*)"', form.text))
            done = browser.post(LOGIN, data={**fields, "username": name, "password": PASSWORD})
            return browser, done.headers.get("location")

        yield enter


def test_django_users_have_their_rights_and_pages_change_no_session(shop, sign_in, tmp_path):
    ada, came_back = sign_in("ada")
    bob, _ = sign_in("bob")
    carl, refused = sign_in("carl")

    assert (came_back, refused) == (PAGE, None)  # Django's admin admits staff users only
    assert (">ada<" in ada.get(PAGE).text, ">bob<" in bob.get(PAGE).text) == (True, True)
    assert carl.get(PAGE).status_code == 303
    assert [one.post(f"{PAGE}/pause").status_code for one in (ada, bob, carl)] == [303, 403, 403]
    assert "ada" in bob.get(PAGE).text  # the user that paused it
    seen = crawl(ada, [f"{PREFIX}/"], LINK)
    assert [path for path in seen if not path.startswith(f"{PREFIX}/")] == []
    assert {path for path, status in seen.items() if status != 200} == {f"{PREFIX}/queues/orders/message"}

    before = sessions(tmp_path)
    assert ">ada<" in ada.get(PAGE, headers={"x-another-secret": "1"}).text
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("UPDATE auth_user SET password = 'another' WHERE username = 'ada'")
        database.execute("UPDATE auth_user SET is_staff = 0 WHERE username = 'bob'")
        database.commit()
    forged = httpx.get(f"{shop}{PAGE}", cookies={"sessionid": "no-such-session"}, timeout=60)

    assert [ada.get(PAGE).status_code, bob.get(PAGE).status_code, forged.status_code] == [303, 303, 303]
    assert sessions(tmp_path) == before


def sessions(folder):
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        return sorted(database.execute("SELECT session_key, session_data FROM django_session"))
