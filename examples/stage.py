"""What every example needs around its story: a Redis, and the account at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reliq import Queue
from reliq.embedded import EmbeddedRedis

#: The private server of this story, if there is one.
_OWN: list[EmbeddedRedis] = []


@contextmanager
def a_redis() -> Iterator[None]:
    """Use the Redis that RELIQ_URL names; without one, start a private server for as long as the story takes."""
    if os.environ.get("RELIQ_URL"):
        yield
        return
    with EmbeddedRedis() as server:
        os.environ["RELIQ_URL"] = server.url
        _OWN.append(server)
        yield
        _OWN.clear()
        del os.environ["RELIQ_URL"]


def print_account(queue: Queue[Any]) -> None:
    """Print how every message of `queue` has ended; fail when one is missing."""
    counts = queue.counts()
    ends = ", ".join(f"{counts.totals.get(kind, 0)} {kind}" for kind in ("acked", "cancelled", "expired", "dead"))
    print(f"Account: {counts.totals['published']} published = {ends}, {counts.alive} alive; {counts.missing} missing.")
    if "RELIQ_URL" in os.environ and not _OWN:
        print(
            f"Queue {queue.name!r} is left in your Redis; after a minute `reliq forget {queue.name} --letters` removes it."
        )
    if counts.missing:
        raise SystemExit("the account does not balance")
