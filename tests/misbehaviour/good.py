"""Two good queues that always have work, and how fast it is done beside the bad."""

import threading
import time
import urllib.error
import urllib.request

import pytest
from waiting import eventually

#: How many of each good queue wait at least.
BACKLOG = 40
#: A rate is that of so many acks.
ACKS = 60
#: From a deed until the good queues have at least half of their rate again.
RECOVERY_SECONDS = 35.0
TICK_SECONDS = 0.05


class GoodWork:
    """Publishes good messages all the time, and asks /live at `port` as often; begins and ends by `with`."""

    def __init__(self, queues, port):
        self._queues, self._port = queues, port
        self.published = dict.fromkeys(queues, 0)
        self.live = []
        self._usual = {}
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

    def note_the_usual_rate(self):
        """Measure how long so many acks take while nobody misbehaves."""
        self._seconds_of_acks("the good ones are worked")
        self._usual = self._seconds_of_acks("the good ones are worked")

    def check_the_rate(self, after):
        """Fail unless both queues have half of their usual rate again, in time, `after` what was done."""
        until = time.monotonic() + RECOVERY_SECONDS
        slow = self._queues
        while slow:
            taken = self._seconds_of_acks(f"both good queues go on after: {after}")
            slow = [queue.name for queue in self._queues if taken[queue] > 2 * self._usual[queue]]
            if slow and time.monotonic() > until:
                pytest.fail(f"{slow} have less than half of their rate {RECOVERY_SECONDS:g} s after: {after}")

    def _seconds_of_acks(self, what):
        begun, before, taken = time.monotonic(), {queue: acked(queue) for queue in self._queues}, {}

        def done():
            for queue in self._queues:
                if queue not in taken and acked(queue) >= before[queue] + ACKS:
                    taken[queue] = time.monotonic() - begun
            return len(taken) == len(self._queues)

        eventually(done, what, RECOVERY_SECONDS)
        return taken

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
