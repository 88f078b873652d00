"""A publisher beside whatever a test does: it keeps what was confirmed."""

from listener import Repeated

from reliq import PublishFailed


class Publisher(Repeated):
    """Publishes one message after another until it is told to stop, and keeps the ids by what became of them."""

    def __init__(self, queue):
        super().__init__()
        self._queue = queue
        self.confirmed, self.unknown, self.refused = set(), set(), set()

    def _work(self):
        for number in range(1_000_000):
            if self._over.is_set():
                return
            try:
                self.confirmed.add(self._queue.publish(number, delay=0.02 * (number % 3 == 0)).id)
            except PublishFailed as failure:
                {"unknown": self.unknown, "refused": self.refused}[failure.outcome].add(failure.id)
