"""Serve the web pages to tests, which request them with clients that act as browsers or programs."""

import asyncio
import html
import re
import threading
from contextlib import ExitStack, contextmanager

import httpx

from reliq.web import Access, app
from reliq.web.serve import PageServer, listen

TOKEN = "a token that nobody guesses"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EVERYTHING = Access.WRITE | Access.BODIES
#: Matches the links of a page, but not the addresses of its forms.
FORMS = "pause|resume|set_limits|purge|cancel|reschedule|redrive|check|run_cron|ask_stacks|logout"
LINK = rf'(?:href|src|action)="(?!#|[^"]*/(?:{FORMS}))([^"]+)"'


class Site:
    """
    A page served at one address.

    Attributes:
        app: the application.
        url: its address, without a slash at the end.
    """

    def __init__(self, served, port, prefix, clients, loop):
        self.clients, self._loop = clients, loop
        self.app = served
        self.url = f"http://127.0.0.1:{port}{prefix}"

    def tasks(self):
        """Return the tasks of the server's event loop."""
        return set(asyncio.all_tasks(self._loop))

    def client(self, **headers):
        """Return a client that sends these headers; the site closes it."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.clients.enter_context(httpx.Client(base_url=self.url, headers=sent, timeout=60, verify=False))

    def program(self):
        """A client that sends the token as a program does."""
        return self.client(**BEARER)

    def browser(self):
        """A client with a session cookie that sends forms with the headers of a browser on the same site."""
        client = self.client(Sec_Fetch_Site="same-origin")
        assert client.post(f"/enter/{self.app.token.once()}").status_code == 303
        return client


def crawl(browser, ways, link, *, prefix=""):
    """Follow links that match a pattern, starting with these paths; return the status of each page."""
    ways, seen = [*ways], {}
    while ways:
        way = ways.pop()
        answer = browser.get(way.removeprefix(prefix))
        seen[way] = answer.status_code
        if "html" in answer.headers["content-type"]:
            found = {html.unescape(one) for one in re.findall(link, answer.text)}
            ways += sorted(found - seen.keys() - {*ways})
    return seen


@contextmanager
def serving(served, *, mounted=None, prefix="", proxy=None):
    """Serve a page, or the application in which it is `mounted`, in a thread; yield the site."""
    with listen("127.0.0.1", 0) as listener, ExitStack() as clients:
        server = PageServer(served, proxy=proxy)
        if mounted is not None:
            server.config.app = mounted
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: _run(loop, server.serve([listener])), name="the page's server")
        server.capture_signals = _no_signals
        thread.start()
        try:
            yield Site(served, listener.getsockname()[1], prefix, clients, loop)
        finally:
            clients.close()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def _run(loop, serving):
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serving)


@contextmanager
def _no_signals():
    yield


@contextmanager
def site_of(url, *, grants=EVERYTHING, **options):
    """Serve the page of a Redis; the token gives all rights under the name alice."""
    with serving(app(url, token=TOKEN, grants=grants.by("alice"), **options)) as site:
        yield site
