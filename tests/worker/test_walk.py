"""The walk of one message through a worker stays short enough to be read."""

from waiting import eventually
from walk import walking

from reliq import Consumer

#: The threads that a message passes; the others go on by their own clocks.
ON_THE_WAY = ("reliq-fetcher", "reliq-handler-1", "reliq-settler")


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
    """The calls of the threads on the way; what the fetcher does after it has handed the message over is its next round."""
    way, handed_over = [], False
    for call in calls:
        thread, _, name = call
        if thread not in ON_THE_WAY or (thread == "reliq-fetcher" and handed_over):
            continue
        way.append(call)
        handed_over = handed_over or name.endswith("ThreadExecutor.submit")
    return way
