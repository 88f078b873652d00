"""dramatiq: an actor asks a limiter in Redis when it runs, and what is refused is tried again after a backoff."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from dramatiq.rate_limits import BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

from benchmarks.peers import kit
from benchmarks.peers.limits import kit as work

#: Its defaults, 15 s and 20 tries, would end most messages as failed.
RETRIES = Retries(max_retries=None, min_backoff=50, max_backoff=1000)
BUCKET_MS = 100

broker = RedisBroker(url=kit.URL, middleware=[RETRIES])
dramatiq.set_broker(broker)
backend = RedisBackend(url=kit.URL)
LIMITERS = {
    "bucket": BucketRateLimiter(backend, "rate", limit=work.RATE * BUCKET_MS // 1000, bucket=BUCKET_MS),
    "window": WindowRateLimiter(backend, "rate", limit=work.RATE, window=1),
}
limiter = LIMITERS[os.environ.get("BENCH_LIMITER", "bucket")]


@dramatiq.actor
def start(body):
    """Return at once, if the limiter permits."""
    _limited(limiter, work.started, body)


@dramatiq.actor
def one_of_a_key(body):
    """Work for a moment, if nothing of this key does."""
    _limited(ConcurrentRateLimiter(backend, f"key-{body['key']}", limit=1), work.worked, body)


def _limited(by, work_on, body):
    with by.acquire(raise_on_failure=False) as acquired:
        if acquired:
            work_on(body)
            return
    work.refused()
    raise dramatiq.RateLimitExceeded(by.key)


def fill_rate(count):
    return kit.timed(lambda: [start.send(body) for body in work.bodies(count)])


def fill_keys(count):
    return kit.timed(lambda: [one_of_a_key.send(body) for body in work.bodies(count)])


def work_rate(processes):
    _work(processes)


def work_window(processes):
    os.environ["BENCH_LIMITER"] = "window"
    _work(processes)


def work_keys(processes):
    _work(processes)


def _work(processes):
    kit.become("-m", "dramatiq", __name__, "--processes", str(processes), "--threads", "8", "--skip-logging")
