"""Publish to and work on two queues on two Cluster nodes while a test disturbs the nodes."""

import threading

from waiting import eventually

from reliq import Consumer, Job, PublishFailed, Queue, WorkerSettings

NAMES = ("sturdy", "frail")


class Work:
    """
    Two producers and a worker.

    Attributes:
        queues: two queues on two nodes.
        ran: queue -> the ids that its handler got.
        confirmed: queue -> the ids of confirmed publishes.
        refused: queue -> its number of failed publishes.
    """

    def __init__(self, cluster):
        self.queues = [Queue(name, str, url=cluster.url) for name in NAMES]
        self.ran, self.confirmed = {name: [] for name in NAMES}, {name: [] for name in NAMES}
        self.refused = dict.fromkeys(NAMES, 0)
        self._over, self._consumer = threading.Event(), Consumer(url=cluster.url)
        self._threads = [threading.Thread(target=self._publish, args=(queue,), daemon=True) for queue in self.queues]
        for queue in self.queues:
            self._handle(queue)

    def __enter__(self):
        """Start producers and worker; return when the worker has handled messages of both queues."""
        self._consumer.start(WorkerSettings(concurrency=4))
        for thread in self._threads:
            thread.start()
        eventually(lambda: all(len(ids) >= 20 for ids in self.ran.values()), "both queues are worked on")
        return self

    def goes_on(self, name):
        """Wait until the worker has handled further messages of a queue."""
        before = len(self.ran[name])
        eventually(lambda: len(self.ran[name]) > before + 20, f"work goes on in {name}")

    def __exit__(self, *_):
        """Stop the producers, and the worker when the queues are empty."""
        self.publish_no_more()
        self._consumer.stop()
        for queue in self.queues:
            queue.close()

    def publish_no_more(self):
        """Stop the producers."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def everything_ran(self):
        """Stop publishing and wait for empty queues; return whether all confirmed messages ran and accounts balance."""
        self.publish_no_more()
        eventually(lambda: sum(one.counts().alive for one in self.queues) == 0, "both queues are empty")
        missing = {name: sorted({*self.confirmed[name]} - {*self.ran[name]}) for name in NAMES}
        assert missing == {name: [] for name in NAMES}
        return [one.counts().missing for one in self.queues] == [0, 0]

    def _handle(self, queue):
        @self._consumer.handler(queue)
        def note(_body: str, job: Job[str]) -> None:
            self.ran[queue.name].append(job.id)

    def _publish(self, queue):
        number = 0
        while not self._over.wait(0.002):
            number += 1
            try:
                queue.publish(str(number), id=f"{queue.name}-{number}")
            except PublishFailed:
                self.refused[queue.name] += 1
            else:
                self.confirmed[queue.name].append(f"{queue.name}-{number}")
