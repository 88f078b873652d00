"""A publisher beside whatever a test does: it keeps what was confirmed."""

import threading

from reliq import PublishFailed


class Publisher:
    """Publishes one message after another until it is told to stop, and keeps the ids by what became of them."""

    def __init__(self, queue):
        self._queue, self._over = queue, threading.Event()
        self.confirmed, self.unknown, self.refused = set(), set(), set()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _work(self):
        for number in range(1_000_000):
            if self._over.is_set():
                return
            try:
                self.confirmed.add(self._queue.publish(number, delay=0.02 * (number % 3 == 0)).id)
            except PublishFailed as failure:
                {"unknown": self.unknown, "refused": self.refused}[failure.outcome].add(failure.id)
