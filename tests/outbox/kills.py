"""
The processes that test_kills.py kills at random moments: `python tests/outbox/kills.py ROLE DATABASE_URL`.

A producer places orders in transactions, each with a message; a relay publishes the messages; workers ship the
orders. The single effect of a shipment is a row.
"""

import random
import sys
import time
from contextlib import contextmanager


def connect(url):
    if url.startswith("sqlite"):
        import sqlite3

        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
        connection.execute("PRAGMA synchronous=OFF")
        return connection
    import psycopg

    return psycopg.connect(url, autocommit=True)


@contextmanager
def transaction(connection):
    """Open a transaction; in SQLite with BEGIN IMMEDIATE, so that two writing processes wait for each other."""
    connection.execute("BEGIN IMMEDIATE" if type(connection).__module__ == "sqlite3" else "BEGIN")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def queue():
    from reliq import Queue

    return Queue("orders", dict, retries=1000)


def produce(url):
    """Place orders until the process is killed; roll back every fourth transaction."""
    from reliq.keys import new_id

    orders, connection = queue(), connect(url)
    while True:
        id = new_id()
        try:
            with transaction(connection) as tx:
                tx.execute(f"INSERT INTO orders VALUES ('{id}')")
                orders.publish_in(tx, {"order": id})
                if random.random() < 0.25:
                    raise LookupError
        except LookupError:
            continue
        time.sleep(0.002)


def relay(url):
    from reliq import Relay
    from reliq.outbox import relay as module, store
    from reliq.outbox.relay import OutboxMover

    store.OVERDUE_MS, module.OVERDUE_EVERY_SECONDS = 300, 0.1
    mover = OutboxMover(Relay(url, poll=0.02))
    while True:
        mover.step()


def work(url):
    from tenacity import wait_fixed

    from reliq import Consumer, WorkerSettings

    consumer, connections = Consumer(), []

    @consumer.handler(queue(), lease=0.3, backoff=wait_fixed(0.05))
    def ship(body, job):
        connection = connections.pop() if connections else connect(url)
        with transaction(connection) as tx:
            if job.once(tx):
                tx.execute(f"INSERT INTO effects VALUES ('{body['order']}')")
        time.sleep(random.random() * 0.05)  # most kills happen here, after the commit and before the ack
        connections.append(connection)

    consumer.run(WorkerSettings(concurrency=4))


if __name__ == "__main__":
    {"producer": produce, "relay": relay, "worker": work}[sys.argv[1].partition("-")[0]](sys.argv[2])
