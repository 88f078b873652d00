"""Two good queues that always have work."""

import threading

from programs import answer
from waiting import eventually

#: How many of each good queue wait at least.
BACKLOG = 40
#: More than a good queue has in flight.
ACKS = 60
TICK_SECONDS = 0.05


class GoodWork:
    """Publishes good messages all the time, and asks /live at `port` as often; begins and ends by `with`."""

    def __init__(self, queues, port):
        self._queues, self._port = queues, port
        self.published = dict.fromkeys(queues, 0)
        self.live = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        """Publish no more; may be called twice."""
        self._over.set()
        self._thread.join()

    def check_they_go_on(self, after):
        """Wait until both queues have worked more messages `after` a deed than were in flight then."""
        before = {queue: acked(queue) for queue in self._queues}
        eventually(
            lambda: all(acked(queue) >= before[queue] + ACKS for queue in self._queues),
            f"both good queues go on after: {after}",
        )

    def _run(self):
        while not self._over.wait(TICK_SECONDS):
            for queue in self._queues:
                missing = BACKLOG - queue.counts().ready
                if missing > 0:
                    self.published[queue] += queue.publish_many(range(missing)).published
            self.live.append(answer(self._port, "/live"))


def acked(queue):
    return queue.counts().totals.get("acked", 0)
