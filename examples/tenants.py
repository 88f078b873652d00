"""
Send the mail of many tenants, fairly and no faster than the mail server allows.

The server takes 100 mails a second in all, and two connections of each tenant. One tenant publishes a newsletter to many
readers, and the mails of the other tenants do not wait behind it. If the server refuses a tenant for a while, no mail of
this tenant starts during that time, and no retry is spent.

    python examples/tenants.py
"""

import threading
import time
from collections import Counter
from typing import TypedDict

from stage import a_redis, print_account

from reliq import Consumer, Job, OutgoingMessage, Queue, RateLimited, WorkerSettings

NEWSLETTER = 60
SENDING_SECONDS = 0.01


class Mail(TypedDict):
    """The body of a message."""

    to: str


MAILS = Queue("tenant-mails", Mail, per_key=2, rate="100/s", burst=10)
consumer = Consumer()


class MailServer:
    """A mail server that counts connections, and refuses one mail."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.most_at_once: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    def send(self, tenant: str, *, is_busy: bool) -> bool:
        """Send a mail; return whether it was sent."""
        with self._lock:
            self._open[tenant] += 1
            self.most_at_once[tenant] = max(self.most_at_once[tenant], self._open[tenant])
        time.sleep(SENDING_SECONDS)
        with self._lock:
            self._open[tenant] -= 1
            if not is_busy:
                self.sent.append(tenant)
        return not is_busy


SERVER = MailServer()


@consumer.handler(MAILS, timeout=10)
def send(mail: Mail, job: Job[Mail]) -> None:
    """Send a mail for the tenant in the message key."""
    tenant = job.key or ""
    is_busy = mail["to"] == "reader-0" and not SERVER.sent.count(tenant)
    if not SERVER.send(tenant, is_busy=is_busy):
        print(f"{tenant} is too fast: no mail of it starts for 0.2 s")
        raise RateLimited(delay=0.2)


def main() -> None:
    """Publish the newsletter of one tenant, then a few mails of two others, and print in which order they were sent."""
    with a_redis():
        MAILS.publish_many(
            OutgoingMessage(body=Mail(to=f"reader-{number}"), key="noisy") for number in range(NEWSLETTER)
        )
        for tenant in ("quiet-a", "quiet-b"):
            MAILS.publish_many(OutgoingMessage(body=Mail(to=f"{tenant}-{number}"), key=tenant) for number in range(3))
        consumer.drain(WorkerSettings(concurrency=8), delayed=True)
        last = max(at for at, tenant in enumerate(SERVER.sent, 1) if tenant != "noisy")
        print(f"The last mail of a quiet tenant went out as number {last} of {len(SERVER.sent)}.")
        print(f"At most {max(SERVER.most_at_once.values())} mails of one tenant were sent at once.")
        print_account(MAILS)


if __name__ == "__main__":
    main()
