"""Many messages in a row cost few calls each, also in a process that a supervisor watches."""

from collections import Counter

import pytest
from waiting import eventually
from walk import walking

from reliq import Consumer, WorkerSettings
from reliq.consumer.board import BoardView
from reliq.consumer.watched import watch

#: Of these many messages the first and the last are not looked at: a thread has work all the while.
MESSAGES, FROM, UNTIL = 400, 100, 300
#: Slots, and the most calls into the package that a handler's thread, or the event loop, makes for one message.
CALLS = {"plain": (1, 38), "async": (16, 31), "batch": (1, 5)}
#: As many more when somebody asks for metrics.
METRICS_CALLS = 19


@pytest.fixture
def calls_of(queue, url, tmp_path):
    """Work through messages, and return how many calls each function has for one."""

    def count(kind, **watched):
        consumer, seen, slots = Consumer(url), 0, CALLS[kind][0]

        def handle(bodies):
            nonlocal seen
            before, seen = seen, seen + (len(bodies) if kind == "batch" else 1)
            walk.recording = before < UNTIL and seen > FROM

        async def ahandle(body):
            handle(body)

        options = {"batch": 20, "linger": 5.0} if kind == "batch" else {}
        consumer.handler(queue, **options)(ahandle if kind == "async" else handle)
        BoardView(tmp_path / "board", ["q"], slots)
        queue.publish_many(["x"] * MESSAGES)
        with walking() as walk:
            watch(consumer, slots, tmp_path / "board", **watched)
            consumer.start(WorkerSettings(concurrency=slots))
            try:
                eventually(lambda: seen == MESSAGES, "all are worked")
            finally:
                consumer.stop()
        its = [name for thread, _, name in walk.calls if thread.startswith(("reliq-handler", "reliq-asyncio"))]
        return {name: count / (UNTIL - FROM) for name, count in Counter(its).most_common()}

    return count


@pytest.mark.parametrize("kind", CALLS)
def test_a_message_costs_few_calls_and_no_event_where_nobody_asks_for_metrics(calls_of, kind):
    calls = calls_of(kind)

    assert sum(calls.values()) <= CALLS[kind][1], calls
    assert not {"notify", "_started", "_handled"} & calls.keys()
    assert calls["Board.begins"] <= (1.1 if kind != "batch" else 0.1)


@pytest.mark.parametrize("kind", CALLS)
def test_metrics_of_a_message_cost_few_calls_more(calls_of, tmp_path, kind):
    calls = calls_of(kind, figures=tmp_path / "figures")

    assert sum(calls.values()) <= CALLS[kind][1] + METRICS_CALLS, calls
