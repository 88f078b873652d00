"""The work of `reliq relay`, once its options are read."""

import signal
import threading
from contextlib import nullcontext
from typing import Any

from reliq.cli.databases import asking
from reliq.cli.output import say
from reliq.client.client import Clients
from reliq.logs.observer import LogObserver
from reliq.metrics.serving import of_relay
from reliq.relay.mover import OutboxMover
from reliq.relay.relay import Relay
from reliq.worker.loop import Loop

#: Port and address of the page of figures.
Page = tuple[int, str]


def move(database: str, *, once: bool, again_ms: int, page: Page | None, **settings: Any) -> None:
    """Move the rows that there are, or all that come until a signal; `settings` are those of a `Relay`."""
    observers: list[Any] = [LogObserver()]
    relay = Relay(database, **settings)
    mover = OutboxMover(relay, Clients(relay.url, observers))
    with asking(mover.store.database):
        mover.check()
        if again_ms:
            say(f"{mover.store.again(again_ms)} rows are sent again")
        if once:
            say(f"moved {mover.move_all()} rows")
            mover.close()
    if not once:
        with nullcontext() if page is None else of_relay(*page, observers):
            _run(mover, observers)


def _run(mover: OutboxMover, observers: list[Any]) -> None:
    """Move rows until a signal comes."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())
    loop = Loop("relay", mover.step, observers)
    loop.start()
    over.wait()
    loop.stop()
    mover.poke()
    loop.join()
    mover.close()
