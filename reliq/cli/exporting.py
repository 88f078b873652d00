"""The work of `reliq exporter`, once its options are read."""

import signal
import threading
from collections.abc import Sequence

from reliq.keys import Keys
from reliq.metrics.serving import of_queues
from reliq.transport.connection import Connection
from reliq.transport.target import Target


def export(redis: Target | None, queues: Sequence[Keys], port: int, host: str) -> None:
    """Serve the figures of queues until a signal."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())
    with of_queues(port, host, connection=Connection.to(redis), queues=queues):
        over.wait()
