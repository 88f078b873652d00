"""The walk of one message through a worker stays short enough to be read."""

from waiting import eventually
from walk import walking

from reliq import Consumer

#: The threads that a message passes, and the last call of each for it; the other threads go by their own clocks.
LAST = {"reliq-fetcher": "ThreadExecutor.submit", "reliq-handler-1": None, "reliq-settler": "Inflight.settled"}


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
    assert len(walk.calls) <= 245, f"{len(walk.calls)} calls:\n{walk}"
    assert len(walk.files) <= 26, f"{len(walk.files)} files: {walk.files}"


def _way(calls):
    """The calls of each thread on the way up to its last for the message; what follows belongs to its next round."""
    way, at_the_end = [], set()
    for call in calls:
        thread, _, name = call
        if thread in LAST and thread not in at_the_end:
            way.append(call)
            if name == LAST[thread]:
                at_the_end.add(thread)
    return way
