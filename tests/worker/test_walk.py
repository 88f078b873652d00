"""The walk of one message through a worker stays short enough to be read."""

from waiting import eventually
from walk import walking

from reliq import Consumer

#: The threads that a message passes: the call by which each hands it over, and the one by which it turns to other work.
END = {
    "reliq-fetcher": ("ThreadExecutor.submit", "Fetcher.step"),
    "reliq-handler-1": ("Settler.settle", "nothing"),
    "reliq-settler": ("Inflight.settled", "Engine._poke"),
}


def test_a_message_passes_few_calls_in_few_files_from_its_wake_up_to_its_ack(queue, url):
    consumer = Consumer(url)
    seen = []
    consumer.handler(queue)(seen.append)
    with walking() as walk:
        consumer.start()
        for warm in range(3):  # the first has threads, connections and scripts made
            queue.publish("warm")
            eventually(lambda warm=warm: len(seen) > warm and queue.counts().alive == 0, "the worker rests again")
        worker = consumer.engine().inflight
        eventually(lambda: worker._watched is not None, "the fetcher waits in Redis")

        walk.recording = True
        queue.publish("x")
        eventually(lambda: queue.counts().alive == 0 and not worker.deliveries(), "the message is acked")
        walk.recording = False
        consumer.stop()

    walk.calls = _way(walk.calls)
    # 200, and a few more on a busy machine: a connection that has rested is looked at before it is used
    assert len(walk.calls) <= 205, f"{len(walk.calls)} calls:\n{walk}"
    assert len(walk.files) <= 23, f"{len(walk.files)} files: {walk.files}"


def _way(calls):
    """The calls of each thread on the way, until it turns to something else."""
    way = []
    for thread, end in END.items():
        its = [call for call in calls if call[0] == thread]
        names = [name for _, _, name in its]
        handed_over = names.index(end[0])
        rest = names[handed_over:]
        way += its[: handed_over + rest.index(end[1])] if end[1] in rest else its
    return way
