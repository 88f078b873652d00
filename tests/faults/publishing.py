"""A publisher that runs beside a test and records the confirmed messages."""

from listener import Repeated

from reliq import PublishFailed


class Publisher(Repeated):
    """Publishes one message after another until it is stopped; sorts their ids by the outcome of the publish."""

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
