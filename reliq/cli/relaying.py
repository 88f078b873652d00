"""The work of `reliq relay`, once its options are read."""

import signal
import threading
from contextlib import nullcontext
from typing import Any

from reliq import health
from reliq.cli.databases import asking
from reliq.cli.output import say
from reliq.client.client import Clients
from reliq.health import PATIENT_SECONDS, Pulse
from reliq.logs.observer import LogObserver
from reliq.metrics.serving import of_relay
from reliq.process.plan import STOP_MARGIN_SECONDS
from reliq.process.service_manager import ServiceManager
from reliq.relay.mover import OutboxMover
from reliq.relay.relay import Relay
from reliq.text import count_of
from reliq.worker.loop import Loop

#: Port and address of the page of figures.
Page = tuple[int, str]

#: How often the main thread looks whether a service manager is to be told something.
TELL_SECONDS = 0.5


def move(database: str, *, once: bool, again_ms: int, page: Page | None, **settings: Any) -> None:
    """Move the rows that there are, or all that come until a signal; `settings` are those of a `Relay`."""
    observers: list[Any] = [LogObserver()]
    relay = Relay(database, **settings)
    clients = Clients(relay.url, observers)
    mover = OutboxMover(relay, clients)
    with asking(mover.store.database):
        mover.check()
        if again_ms:
            say(f"{count_of(mover.store.again(again_ms), 'row is', 'rows are')} sent again")
        if once:
            say(f"moved {count_of(mover.move_all(), 'row')}")
            mover.close()
    if not once:
        # A round may wait for the confirmation of each of its calls: only one of minutes hangs.
        pulse = Pulse(rounds="round", seconds=PATIENT_SECONDS)
        serving = of_relay(*page, observers, pulse=pulse, connection=clients.connection()) if page else nullcontext()
        with serving:
            _run(mover, observers, pulse)


def _run(mover: OutboxMover, observers: list[Any], pulse: Pulse) -> None:
    """Move rows until a signal comes."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())

    def step() -> float:
        try:
            return mover.step()
        finally:  # also one that found Redis away: a restart would not help
            pulse.beat()

    loop = Loop("relay", step, observers)
    manager = ServiceManager()
    loop.start()
    while not over.wait(TELL_SECONDS):
        tell(manager, pulse)
    manager.stop(STOP_MARGIN_SECONDS)
    loop.stop()
    mover.poke()
    loop.join()
    mover.close()


def tell(manager: ServiceManager, pulse: Pulse) -> None:
    """Tell a service manager what is due; one that watches hears nothing of a relay whose round does not end."""
    if not health.live([pulse]):
        manager.look([pulse])
