"""Two queues of good messages that always have a backlog."""

from listener import Repeated
from programs import answer
from waiting import eventually

#: Minimum backlog of each good queue.
BACKLOG = 40
#: More messages than a good queue has in flight.
ACKS = 60
TICK_SECONDS = 0.05


class GoodWork(Repeated):
    """Publishes good messages during its block, and regularly requests /live at `port`."""

    def __init__(self, queues, port):
        super().__init__()
        self._queues, self._port = queues, port
        self.published = dict.fromkeys(queues, 0)
        self.live = []

    def check_they_go_on(self, after):
        """Wait until both queues have handled more messages after the misbehaviour `after` than were in flight at that time."""
        before = {queue: acked(queue) for queue in self._queues}
        eventually(
            lambda: all(acked(queue) >= before[queue] + ACKS for queue in self._queues),
            f"both good queues go on after: {after}",
        )

    def _work(self):
        while not self._over.wait(TICK_SECONDS):
            for queue in self._queues:
                missing = BACKLOG - queue.counts().ready
                if missing > 0:
                    self.published[queue] += queue.publish_many(range(missing)).published
            self.live.append(answer(self._port, "/live"))


def acked(queue):
    return queue.counts().totals.get("acked", 0)
