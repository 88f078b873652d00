"""The work of `reliq relay`, once its options are read."""

from contextlib import nullcontext
from typing import Any

import typer

from reliq.cli.options import report_database_errors
from reliq.cli.output import EXIT_UNFINISHED, complain, say
from reliq.consumer import STOPS, SignalNotes, handle_signal
from reliq.logs.observer import LogObserver
from reliq.metrics.serving import of_relay
from reliq.outbox.relay import OutboxMover, Relay
from reliq.redis.client import Clients
from reliq.supervisor.plan import STOP_MARGIN_SECONDS
from reliq.supervisor.supervisor import ServiceManager
from reliq.text import pluralize
from reliq.worker import health
from reliq.worker.health import PATIENT_SECONDS, Pulse
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
    with report_database_errors(mover.store.database):
        mover.check()
        if again_ms:
            say(f"{pluralize(mover.store.again(again_ms), 'row is', 'rows are')} sent again")
        if once:
            say(f"moved {pluralize(mover.move_all(), 'row')}")
            left = mover.store.look().waiting
            mover.close()
            if left:
                complain(
                    f"{pluralize(left, 'row remains', 'rows remain')}: `reliq outbox refused` lists refused rows; for others, see "
                    "the errors of their queues above"
                )
                raise typer.Exit(EXIT_UNFINISHED)
    if not once:
        # A round may wait for the confirmation of each of its calls: only one of minutes hangs.
        pulse = Pulse(rounds="round", seconds=PATIENT_SECONDS)
        serving = (
            of_relay(*page, observers, pulse=pulse, connection=clients.connection(), complaint=mover.complaint)
            if page
            else nullcontext()
        )
        with serving:
            _run(mover, observers, pulse)


def _run(mover: OutboxMover, observers: list[Any], pulse: Pulse) -> None:
    """Move rows until a signal comes."""
    signals = SignalNotes()
    for number in STOPS:
        handle_signal(number, signals.note)

    def step() -> float:
        try:
            return mover.step()
        finally:  # also one that found Redis away: a restart would not help
            pulse.beat()

    loop = Loop("relay", step, observers)
    manager = ServiceManager()
    loop.start()
    while not signals.wait(TELL_SECONDS):
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
