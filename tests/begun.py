"""Begin a call of a handler as a worker's thread does, without the handler."""

import threading
import time

from reliq.message import Claimed
from reliq.worker.slots import HandlerCall, deliveries_of


def begun(handler, *ids):
    """Return a call of a handler with these messages, which has just begun in this thread."""
    now, timeout = time.monotonic(), handler.timeout_seconds
    deliveries = deliveries_of([Claimed(id, "me.1:30000", 1) for id in ids], handler, now)
    return HandlerCall(
        deliveries, handler, now, None if timeout is None else now + timeout, thread=threading.get_ident()
    )
