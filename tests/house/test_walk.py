"""The way of one message through the package is short enough to be followed."""

from walk import walked

from reliq import Queue


def test_a_publish_takes_at_most_45_calls_in_12_files(url):
    queue = Queue("q", url=url)
    for _ in range(3):
        queue.publish({"n": 1})

    with walked() as walk:
        queue.publish({"n": 1})

    assert walk.hops[0].function == "publish"
    assert (len(walk.hops) <= 45, len(walk.files) <= 12) == (True, True), str(walk)
    queue.close()
