"""
Deliver webhooks to servers that fail, hang and recover.

Every failure is tried again, later and later. What the receiver refuses for good is a dead letter at
once; what fails to the end becomes one. The receiver here is a real HTTP server on this machine.

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

#: A receiver has so long to answer.
ANSWER_SECONDS = 0.3
REFUSED_FOR_GOOD = range(400, 500)


class Hook(TypedDict):
    """The message: what to send where."""

    url: str
    event: dict[str, str]


HOOKS = Queue("webhooks", Hook, retries=4)
consumer = Consumer()


@consumer.handler(HOOKS, timeout=10, backoff=wait_exponential(multiplier=0.05, max=1))
def deliver(hook: Hook, job: Job[Hook]) -> None:
    """Send the event; any error but a refusal is worth another try."""
    request = urllib.request.Request(
        hook["url"],
        data=json.dumps(hook["event"]).encode(),
        # A delivery may be repeated: by this header the receiver knows one that it has already.
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
    """Somebody else's server, as they are."""

    calls: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        """Answer as the path says."""
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
        """Keep quiet: the story is told by the sender."""


def main() -> None:
    """Publish one webhook for each sort of receiver, deliver them all, and show what could not be delivered."""
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
