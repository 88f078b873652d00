"""
Deliver webhooks to servers that fail, hang and recover.

reliq retries each failure, with growing delays. A webhook that the receiver refuses (HTTP 4xx) becomes a dead letter
immediately; other webhooks become dead letters when no retry is left. The receiver is an HTTP server in this program.

    python examples/webhooks.py
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, TypedDict

from stage import a_redis, print_account
from tenacity import wait_exponential

from reliq import Consumer, Job, Queue, Reject, WorkerSettings

#: How long to wait for an answer of the receiver.
ANSWER_SECONDS = 0.3
REFUSED_FOR_GOOD = range(400, 500)


class Hook(TypedDict):
    """The body of a message: an event, and the URL that gets it."""

    url: str
    event: dict[str, str]


HOOKS = Queue("webhooks", Hook, retries=4)
consumer = Consumer()


@consumer.handler(HOOKS, timeout=10, backoff=wait_exponential(multiplier=0.05, max=1))
def deliver(hook: Hook, job: Job[Hook]) -> None:
    """Send the event. A refusal rejects the message; any other error retries it."""
    request = urllib.request.Request(
        hook["url"],
        data=json.dumps(hook["event"]).encode(),
        # A webhook can be sent twice. By this header, the receiver can ignore the second.
        headers={"Content-Type": "application/json", "Idempotency-Key": job.id},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            print(f"{job.id}: delivered at attempt {job.attempt} (HTTP {answer.status})")
    except urllib.error.HTTPError as error:
        if error.code in REFUSED_FOR_GOOD:
            raise Reject(reason=f"the receiver refuses it: HTTP {error.code}") from error
        raise


class Receiver(BaseHTTPRequestHandler):
    """The server of a customer: it works, recovers, hangs, moves or fails."""

    calls: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        """Answer with the status that belongs to the path."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.calls[self.path] += 1
        first_calls = self.calls[self.path] <= 2
        match self.path:
            case "/recovers" if first_calls:
                self._answer(503)
            case "/hangs" if first_calls:
                time.sleep(2 * ANSWER_SECONDS)
            case "/moved-away":
                self._answer(410)
            case "/broken":
                self._answer(500)
            case _:
                self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the handler prints the results."""


def main() -> None:
    """Publish a webhook for each behaviour of the receiver, deliver them, and print the dead letters."""
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{receiver.server_port}"
    with a_redis():
        for path in ("well", "recovers", "hangs", "moved-away", "broken"):
            HOOKS.publish({"url": f"{base}/{path}", "event": {"order": "42", "state": "paid"}}, id=f"to-{path}")
        consumer.drain(WorkerSettings(concurrency=4), delayed=True, raise_errors=False)
        for letter in HOOKS.dead_letters():
            print(f"{letter.id}: dead letter after {letter.attempts} attempts, {letter.reason}: {letter.error}")
        print_account(HOOKS)
    receiver.shutdown()
    receiver.server_close()


if __name__ == "__main__":
    main()
