"""The limit: reliq's own scripts, a SET and a list, driven by one client with nothing around them."""

from datetime import UTC, datetime

from benchmarks.peers import kit
from reliq.bench.bench import Scale, Stage, bench
from reliq.message import Outgoing


def one(count):
    return count / bench.sets(_stage(singles=count))


def bulk(count):
    return count / bench.publishes(_stage(many=count))


def drain(count):
    return count / bench.drains(_stage(many=count))


def late(rate, seconds, lead):
    """Publish, and be the worker too."""
    stage, dues = _stage(), kit.dues(rate, seconds, lead)
    stage.queue.publish_many(Outgoing(body=kit.BODY, at=datetime.fromtimestamp(due, UTC)) for due in dues)
    bench.begin_when_due(stage, dues, kit.note)


def slow(count):
    with bench.handing_over(_stage()) as hand_over:
        kit.slowly(lambda body: hand_over() if body["sent"] else None, count)


def work(processes):
    """Wait for what `slow` hands over; the other steps need no worker."""
    bench.take_over(kit.URL, _stage().queue, kit.note)


def _stage(**numbers):
    return Stage(kit.URL, "bare", Scale(**numbers), lifeline=-1)
