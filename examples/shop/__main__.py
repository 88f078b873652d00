"""Opens the shop for a short's story: an embedded Redis, SQLite, the web server, a worker, and a mail server."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx

from reliq import Admin
from reliq.embedded import EmbeddedRedis, free_port
from shop.database import open_database
from shop.queues import CLOSING, MAILS, REPORTS

#: In this story an order is closed after four seconds.
PAY_WITHIN = 4.0


class MailServer(BaseHTTPRequestHandler):
    """Somebody else's server: it takes a mail once, by its key, and is away for a moment at first."""

    inbox: ClassVar[dict[str, dict[str, str]]] = {}
    away_for: ClassVar[list[int]] = [503, 503]

    def do_POST(self) -> None:
        """Take a mail."""
        mail = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.away_for.pop() if self.away_for else 200
        if answer == 200:
            self.inbox.setdefault(self.headers["Idempotency-Key"], mail)
        self.send_response(answer)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def mail_server() -> Iterator[str]:
    """Serve the mail server; give its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), MailServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextmanager
def process(*command: str) -> Iterator[None]:
    """Run a program of the shop, and end it in peace."""
    started = subprocess.Popen([sys.executable, "-m", *command], cwd=Path(__file__).parents[1])
    try:
        yield
    finally:
        started.terminate()
        started.wait(30)


def until(there: Callable[[], object], what: str) -> None:
    """Wait until something is there."""
    deadline = time.monotonic() + 30
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it never came: {what}")
        time.sleep(0.05)


def is_up(shop: httpx.Client) -> bool:
    """Say whether the web server answers."""
    try:
        return shop.get("/orders/0").status_code == 404
    except httpx.TransportError:
        return False


def main() -> None:
    """Place six orders, pay two of them, and see what becomes of all."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(options={"appendonly": "yes"}))
        folder, port = stack.enter_context(tempfile.TemporaryDirectory()), str(free_port())
        os.environ |= {
            "RELIQ_URL": redis.url,
            "SHOP_DATABASE": f"sqlite:///{folder}/shop.db",
            "SHOP_MAIL_HOOK": stack.enter_context(mail_server()),
            "SHOP_PAY_WITHIN": str(PAY_WITHIN),
        }
        open_database(os.environ["SHOP_DATABASE"]).dispose()
        worker = ("reliq", "worker", "shop.jobs:consumer", "--concurrency", "4", "--log-level", "warning")
        stack.enter_context(process(*worker))
        web = ("uvicorn", "shop.web:app", "--port", port, "--log-level", "warning")
        stack.enter_context(process(*web))
        tell(stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}")))


def tell(shop: httpx.Client) -> None:
    """Tell the story of six orders and a report."""
    until(lambda: is_up(shop), "the web server")
    until(lambda: Admin().workers(), "the worker")
    orders = [
        shop.post("/orders", json={"email": f"customer{at}@shop.example", "cents": 1000 * at}).json()["number"]
        for at in range(1, 7)
    ]
    print(f"Orders {orders[0]} to {orders[-1]} are placed.")
    until(lambda: CLOSING.counts().totals.get("published") == len(orders), "the relay has moved the outbox")
    for number in orders[::3]:
        print(f"Order {number} is {shop.post(f'/orders/{number}/payment').json()['state']}.")
    until(lambda: sum(shop.get(f"/orders/{one}").json()["state"] == "closed" for one in orders) == 4, "four are closed")
    for number in orders:
        print(f"In the end order {number} is {shop.get(f'/orders/{number}').json()['state']}.")
    Admin().run_cron(REPORTS.name, "nightly_report")
    until(lambda: len(MailServer.inbox) == 13, "thirteen mails")
    print(f"{len(MailServer.inbox)} mails were sent, each once.")
    queues = (CLOSING, MAILS, REPORTS)
    until(lambda: all(queue.counts().alive == 0 for queue in queues), "everything is done")
    for queue in queues:
        counts = queue.counts()
        ends = ", ".join(f"{counts.totals.get(kind, 0)} {kind}" for kind in ("acked", "cancelled", "dead"))
        print(f"{queue.name}: {counts.totals['published']} published = {ends}; {counts.missing} missing.")


if __name__ == "__main__":
    main()
