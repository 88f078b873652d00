"""A process that publishes the ticks of three periodic jobs on a fast clock."""

import os
import random
import threading
import time
from contextlib import suppress

from reliq import Consumer, Queue
from reliq.errors import RedisUnavailableError
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.worker.upkeep import Ticker

#: Fast seconds in a real second: a process stopped for two real seconds is silent for more than a minute.
SPEED = 40
#: Version of the program -> seconds between two ticks.
VERSIONS = {"one": 1, "two": 2}
POLICIES = ("all", "latest", "skip")
BEGIN_SECONDS = 1_800_000_000


def entries(url, version):
    consumer = Consumer()
    for policy in POLICIES:
        queue = Queue(policy, str, url=url)
        consumer.every(VERSIONS[version], queue=queue, body=str, name=policy, catch_up=policy, misfire_grace_time=3600)
    return consumer.periodic


def clock(began):
    """Return a fast clock in microseconds; it starts at the monotonic time `began`, shared by all processes."""
    return lambda: int((BEGIN_SECONDS + (time.monotonic() - began) * SPEED) * 1e6)


def tick_for_ever(url, began, version, seed, folder):
    """
    Publish ticks with a pause between computing and publishing, in which the process may be killed.

    Writes a file into the folder when the process has registered its periodic jobs.
    """
    chance, pause = random.Random(seed), threading.Event()
    ticker = Ticker(Client(Connection.to(url).wire(), (), clock(began)), entries(url, version))
    make = ticker._publish

    def late(due):
        if due:
            pause.wait(chance.uniform(0, 0.03))
        make(due)

    ticker._publish = late
    while True:
        with suppress(RedisUnavailableError):  # on a busy machine
            ticker.step()
            (folder / str(os.getpid())).touch()
        pause.wait(0.02)
