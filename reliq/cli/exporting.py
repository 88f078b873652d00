"""The work of `reliq exporter`, once its options are read."""

from collections.abc import Sequence

from reliq.consumer.signals import STOPS, SignalNotes, take
from reliq.keys import Keys
from reliq.metrics.serving import of_queues
from reliq.transport.connection import Connection
from reliq.transport.target import Target


def export(redis: Target | None, queues: Sequence[Keys], port: int, host: str) -> None:
    """Serve the figures of queues until a signal."""
    signals = SignalNotes()
    for number in STOPS:
        take(number, signals.note)
    with of_queues(port, host, connection=Connection.to(redis), queues=queues):
        signals.wait()
