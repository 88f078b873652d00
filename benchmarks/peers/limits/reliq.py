"""reliq: limits are kept in Redis; a message that may not start waits in its line."""

import reliq
from benchmarks.peers import kit
from benchmarks.peers.limits import kit as work

RATED = reliq.Queue("rated", url=kit.URL, rate=f"{work.RATE}/s")
KEYED = reliq.Queue("keyed", url=kit.URL, per_key=1)
ORDERED = reliq.Queue("ordered", url=kit.URL, ordered=True)

rated, keyed, ordered = reliq.Consumer(), reliq.Consumer(), reliq.Consumer()


@rated.handler(RATED)
def start(body: dict) -> None:
    """Return at once."""
    work.started(body)


@keyed.handler(KEYED)
def one_of_a_key(body: dict) -> None:
    """Work for a moment."""
    work.worked(body)


@ordered.handler(ORDERED)
def next_of_a_key(body: dict) -> None:
    """Work for a moment."""
    work.worked(body)


def fill_rate(count):
    return kit.timed(lambda: RATED.publish_many(work.bodies(count)))


def fill_keys(count):
    return _fill(KEYED, count)


def fill_ordered(count):
    return _fill(ORDERED, count)


def _fill(queue, count):
    messages = (reliq.Outgoing(body=body, key=f"key-{body['key']}") for body in work.bodies(count))
    return kit.timed(lambda: queue.publish_many(messages))


def work_rate(processes):
    _work("rated", processes)


def work_keys(processes):
    _work("keyed", processes)


def work_ordered(processes):
    _work("ordered", processes)


def _work(consumer, processes):
    place = f"{__name__}:{consumer}"
    kit.become("-m", "reliq", "worker", place, "--processes", str(processes), "--log-level", "error")
