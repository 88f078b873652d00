"""Demonstrate the shop with a private Redis, SQLite, the web server, a worker, and a mail server."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
from stage import a_private_redis, print_account, running

from reliq import Admin
from reliq.testing.server import free_port
from shop.database import open_database
from shop.queues import CLOSING, MAILS, REPORTS


class MailServer(BaseHTTPRequestHandler):
    """A mail server that fails twice at first, and takes each Idempotency-Key once."""

    inbox: ClassVar[dict[str, dict[str, str]]] = {}
    away_for: ClassVar[list[int]] = [503, 503]

    def do_POST(self) -> None:
        """Answer 503 at first; then store the mail unless its key is known."""
        mail = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.away_for.pop() if self.away_for else 200
        if answer == 200:
            self.inbox.setdefault(self.headers["Idempotency-Key"], mail)
        self.send_response(answer)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def until(there: Callable[[], object], what: str) -> None:
    """Wait until `there` returns a true value; `what` names the condition in the error."""
    deadline = time.monotonic() + 60
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it never came: {what}")
        time.sleep(0.05)


def main() -> None:
    """Start all servers and the worker, then run the demonstration."""
    mail_server = ThreadingHTTPServer(("127.0.0.1", 0), MailServer)
    threading.Thread(target=mail_server.serve_forever, daemon=True).start()
    with ExitStack() as stack:
        stack.enter_context(a_private_redis(appendonly="yes"))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        port = str(free_port())
        os.environ |= {
            "SHOP_DATABASE": f"sqlite:///{folder}/shop.db",
            "SHOP_MAIL_HOOK": f"http://127.0.0.1:{mail_server.server_port}",
            "SHOP_PAY_WITHIN": os.environ.get("SHOP_PAY_WITHIN", "4"),
        }
        open_database(os.environ["SHOP_DATABASE"]).dispose()
        for words in ("reliq worker shop.jobs:consumer --concurrency 4", f"uvicorn shop.web:app --port {port}"):
            command = [sys.executable, "-m", *words.split(), "--log-level", "warning"]
            stack.enter_context(running(*command, cwd=Path(__file__).parents[1]))
        retrying = httpx.HTTPTransport(retries=7)
        tell(stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=retrying)))


def tell(shop: httpx.Client) -> None:
    """Place six orders, pay two, wait until the others are closed, and print the result."""
    shop.get("/orders/0")  # returns once the web server is up
    until(lambda: Admin().workers(), "the worker")
    orders = [
        shop.post("/orders", json={"email": f"customer{at}@shop.example", "cents": 1000 * at}).json()["number"]
        for at in range(1, 7)
    ]
    print(f"Orders {orders[0]} to {orders[-1]} are placed.")
    until(lambda: CLOSING.counts().totals.get("published") == len(orders), "the relay has moved the outbox")
    for number in orders[::3]:
        print(f"Order {number} is {shop.post(f'/orders/{number}/payment').json()['state']}.")
    until(
        lambda: sum(shop.get(f"/orders/{number}").json()["state"] == "closed" for number in orders) == 4,
        "four are closed",
    )
    for number in orders:
        print(f"In the end order {number} is {shop.get(f'/orders/{number}').json()['state']}.")
    Admin().run_cron(REPORTS.name, "nightly_report")
    until(lambda: len(MailServer.inbox) == 13, "thirteen mails")
    print(f"{len(MailServer.inbox)} mails were sent, each once.")
    queues = (CLOSING, MAILS, REPORTS)
    until(lambda: all(queue.counts().alive == 0 for queue in queues), "everything is done")
    for queue in queues:
        print_account(queue)
