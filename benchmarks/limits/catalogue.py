"""Whose limiters are compared, as they are best set; and who has none, with where that is said."""

from dataclasses import dataclass

from benchmarks.catalogue import PEERS, Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limiter:
    """
    One limiter of one queue.

    Attributes:
        of: the peer's name in the catalogue of queues, whose environment it runs in.
        module: its file in `peers/limits`.
        setting: what was set, in a few words.
        fill: the step that publishes.
        worker: the step that works.
        messages: how many are drained, where that is what is measured.
    """

    name: str
    of: str
    module: str
    setting: str
    fill: str
    worker: str
    messages: int = 0

    @property
    def peer(self) -> Peer:
        """The queue that it is part of."""
        return next(peer for peer in PEERS if peer.name == self.of)


RATES = (
    Limiter(
        name="reliq",
        of="reliq",
        module="reliq",
        setting="rate, with the burst it has by itself",
        fill="fill_rate",
        worker="work_rate",
    ),
    Limiter(
        name="BullMQ, windows of 100 ms",
        of="BullMQ (Node)",
        module="bullmq.mjs",
        setting="limiter: a tenth of the rate in 100 ms, 100 at once",
        fill="fill_rate",
        worker="work_rate",
    ),
    Limiter(
        name="BullMQ, windows of 1 s",
        of="BullMQ (Node)",
        module="bullmq.mjs",
        setting="limiter: the rate in 1 s, 100 at once",
        fill="fill_rate",
        worker="work_window",
    ),
    Limiter(
        name="dramatiq, buckets of 100 ms",
        of="dramatiq",
        module="dramatiq",
        setting="BucketRateLimiter, 8 threads, tried again after 50 ms to 1 s for ever",
        fill="fill_rate",
        worker="work_rate",
    ),
    Limiter(
        name="dramatiq, window of 1 s",
        of="dramatiq",
        module="dramatiq",
        setting="WindowRateLimiter, 8 threads, tried again after 50 ms to 1 s for ever",
        fill="fill_rate",
        worker="work_window",
    ),
    Limiter(
        name="Celery",
        of="Celery",
        module="celery",
        setting="rate_limit of each worker, a quarter of the rate; 16 threads",
        fill="fill_rate",
        worker="work_rate",
    ),
)

ONE_OF_A_KEY = (
    Limiter(
        name="reliq, per_key=1",
        of="reliq",
        module="reliq",
        setting="16 threads",
        fill="fill_keys",
        worker="work_keys",
        messages=10_000,
    ),
    Limiter(
        name="reliq, ordered",
        of="reliq",
        module="reliq",
        setting="16 threads",
        fill="fill_ordered",
        worker="work_ordered",
        messages=10_000,
    ),
    Limiter(
        name="dramatiq",
        of="dramatiq",
        module="dramatiq",
        setting="ConcurrentRateLimiter of each key, 8 threads, tried again after 50 ms to 1 s for ever",
        fill="fill_keys",
        worker="work_keys",
        messages=6000,
    ),
    Limiter(
        name="RQ",
        of="RQ",
        module="rq",
        setting="RateLimit(key, concurrency=1), SimpleWorker, one job at a time in a process",
        fill="fill_keys",
        worker="work_keys",
        messages=3000,
    ),
)

#: Who is in neither table, or in one alone, and why.
LACKS = {
    "SAQ": "no rate limiter (github.com/tobymao/saq/issues/183); a job's group_key works with PostgreSQL alone",
    "arq": "no limiter but max_jobs of each worker (github.com/python-arq/arq/issues/426)",
    "RQ": "no rate: its RateLimit is a number of jobs at a time",
    "Celery": "nothing for a key",
    "BullMQ": "groups, which have keys, are part of BullMQ Pro",
}
