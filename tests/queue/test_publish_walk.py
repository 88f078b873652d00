"""The way of one message through the package is short enough to be followed."""

from walk import walking

from reliq import Queue


def test_a_publish_takes_at_most_45_calls_in_12_files(url):
    queue = Queue("q", url=url)
    for _ in range(3):
        queue.publish({"n": 1})

    with walking() as walk:
        walk.recording = True
        queue.publish({"n": 1})
        walk.recording = False

    assert (len(walk.calls) <= 45, len(walk.files) <= 12) == (True, True), str(walk)
    assert "Queue.publish" in str(walk).splitlines()[0]
    queue.close()
