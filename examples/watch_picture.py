"""
Draw `reliq watch` as it looks while three queues are worked: the picture in the README.

    python examples/watch_picture.py examples/watch.svg [SECONDS]

It brings a Redis of its own, a worker in this process whose jobs take their time and sometimes fail, and a producer.
"""

import random
import sys
import time

from stage import a_private_redis  # first: it names the command that installs the others

# isort: split
from rich.console import Console

from reliq import Consumer, Queue, Reject, WorkerSettings
from reliq.admin import Admin
from reliq.cli.watch import Screen

COLUMNS, LINES = 100, 28
LOOK_SECONDS = 0.25
consumer = Consumer()


@consumer.handler("orders", concurrency=5)
def close(_order: dict[str, int]) -> None:
    """Close an order; the gateway is not always there."""
    time.sleep(random.uniform(0.01, 0.06))
    chance = random.random()
    if chance < 0.03:
        raise ConnectionError("payment gateway: connection refused")
    if chance < 0.04:
        raise Reject(reason="no such card")


@consumer.handler("mails", concurrency=4)
def send(_mail: dict[str, int]) -> None:
    """Send a mail, to a server that is slow and sometimes too slow."""
    time.sleep(random.uniform(0.05, 0.3))
    if random.random() < 0.1:
        raise TimeoutError("smtp: timed out")


@consumer.handler("pictures", concurrency=4)
def shrink(_picture: dict[str, int]) -> None:
    """Shrink a picture, which takes long."""
    time.sleep(random.uniform(3, 30))


def main() -> None:
    """Work and publish for a while, then draw the last moment into the file."""
    path, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    with a_private_redis() as url:
        orders, mails, pictures = (Queue(name) for name in ("orders", "mails", "pictures"))
        pictures.publish_many({"number": number} for number in range(60))
        mails.publish_many({"number": number} for number in range(300))
        orders.publish({"number": 0}, delay=1800, id="order-41")
        orders.publish({"number": 0}, delay=1800, id="order-42")
        orders.cancel("order-42")
        consumer.start(WorkerSettings(concurrency=13))
        watcher = Admin(url).watch()
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                orders.publish_many({"number": number} for number in range(random.randint(5, 30)))
                mails.publish_many({"number": number} for number in range(random.randint(0, 6)))
                moment = watcher.look()
                time.sleep(LOOK_SECONDS)
        finally:
            consumer.stop(grace=0)
    console = Console(record=True, width=COLUMNS, height=LINES, file=sys.stderr, force_terminal=True)
    console.print(Screen(moment, "redis://redis.shop:6379/0", LOOK_SECONDS))
    console.save_svg(path, title="reliq watch")
    print(f"{path} shows {len(moment.overview.queues)} queues and {len(moment.overview.workers or ())} worker.")


if __name__ == "__main__":
    main()
