"""`publish_many` sends a call in a thread while it builds the next call; the results stay the same."""

import pickle
import subprocess
import sys
import textwrap
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain

import pytest

from reliq import BodyError, OutgoingMessage, PublishFailed


def test_publish_many_in_a_thread_outlives_the_main_thread(queue, url):
    script = """
        import sys, threading
        from reliq import Queue

        def items():
            yield from ({"n": n} for n in range(10))
            threading.main_thread().join()  # Python lets no new thread of an executor start from now on
            yield from ({"n": n} for n in range(10, 40))

        queue = Queue("q", url=sys.argv[1])
        threading.Thread(target=lambda: print(queue.publish_many(items(), chunk=10).published)).start()
    """

    command = [sys.executable, "-c", textwrap.dedent(script), url]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ran.stdout, ran.stderr) == ("40\n", "")
    assert queue.counts().ready == 40


def test_failed_call_is_raised_before_a_later_bad_item(queue, call, client):
    client.set(queue.keys.ready, "not a list")

    with pytest.raises(PublishFailed) as failed:
        call(queue, "publish_many", [{"n": 1}, {"n": 2}, object()], chunk=2)

    assert (failed.value.outcome, failed.value.confirmed) == ("refused", 0)


def test_items_before_a_bad_item_are_published(queue, call):
    with pytest.raises(BodyError):
        call(queue, "publish_many", [{"n": 1}, {"n": 2}, {"n": 3}, object()], chunk=2)

    assert queue.counts().ready == 2


@pytest.mark.parametrize("chunk", [1, 2, 500], ids="chunk={}".format)
def test_rest_of_a_failed_publish_many_continues_an_iterator(queue, call, client, chunk):
    """After a failure no message is left out, and none is published twice."""
    client.set(queue.keys.pending, "not a sorted set")
    bodies = [{"n": n} for n in range(6)]
    bodies[2] = OutgoingMessage(body={"n": 2}, delay=3600)  # due later, so it meets the wrong type
    bodies[3] = OutgoingMessage(body={"n": 3}, id="three", headers={"tenant": "a"}, retries=2, ttl=60)
    items = iter(bodies)

    with pytest.raises(PublishFailed) as failed:
        call(queue, "publish_many", items, chunk=chunk)

    rest = failed.value.rest
    client.delete(queue.keys.pending)
    assert failed.value.confirmed == 2
    assert rest[0].body == {"n": 2}
    assert (rest[0].delay, [one.id for one in rest][: len(failed.value.ids)]) == (3600, list(failed.value.ids))
    done = call(queue, "publish_many", chain((replace(one, delay=0) for one in rest), items), chunk=chunk)
    assert (done.published, done.duplicates) == (4, ())
    with queue.receive(limit=100) as jobs:
        assert sorted(job.body["n"] for job in jobs) == [0, 1, 2, 3, 4, 5]


def test_rest_has_the_messages_with_all_their_options(queue, call, client):
    wanted = OutgoingMessage(
        body={"n": 1},
        at=datetime(2026, 12, 1, 12, 30, 0, 125000, UTC),
        id="one",
        retries=2,
        ttl=60.0,
        headers={"tenant": "a"},
        dedup=120.0,
        ignore_dedup=True,
        publication_id=7,
        key="k",
    )
    client.set(queue.keys.pending, "not a sorted set")

    with pytest.raises(PublishFailed) as failed:
        call(queue, "publish_many", [wanted])

    assert failed.value.rest == (wanted,)
    assert pickle.loads(pickle.dumps(failed.value)).rest == ()
