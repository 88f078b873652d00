"""Two good queues that always have work."""

import threading
import urllib.error
import urllib.request

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
        self.end()

    def end(self):
        """Publish no more."""
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
            self.live.append(answer_of_live(self._port))


def acked(queue):
    return queue.counts().totals.get("acked", 0)


def answer_of_live(port):
    """Status and text, 0 and none when the endpoint is not there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
