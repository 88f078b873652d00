"""
Orders that are placed, relayed and shipped while their processes are killed at random moments.

A process places orders in transactions, each with a message; a relay moves them; two workers ship each, whose one effect is
a row. `python -m tests.outbox.kills postgresql --kills 200` runs until all kills are done and every order is shipped.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from reliq.embedded import EmbeddedRedis
from reliq.outbox.tables import ddl

HERE = Path(__file__)
TABLES = (
    "CREATE TABLE orders (id text PRIMARY KEY)",
    "CREATE TABLE shipped (id text NOT NULL)",
)
ROLES = ("producer", "relay", "worker-1", "worker-2")


def connect(url):
    if url.startswith("sqlite"):
        import sqlite3

        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
        connection.execute("PRAGMA synchronous=OFF")
        return connection
    import psycopg

    return psycopg.connect(url, autocommit=True)


class transaction:  # noqa: N801  as psycopg's
    """BEGIN IMMEDIATE in SQLite, so that two who write wait for each other."""

    def __init__(self, connection) -> None:
        self._connection = connection
        self._begin = "BEGIN IMMEDIATE" if type(connection).__module__ == "sqlite3" else "BEGIN"

    def __enter__(self):
        self._connection.execute(self._begin)
        return self._connection

    def __exit__(self, kind, error, trace) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")


# ---- the processes, each told its databases and the mutants by its environment


def queue():
    from reliq import Queue

    return Queue("orders", dict, retries=1000)


def produce(url):
    """Place orders for ever, every fourth in a transaction that is rolled back; the process is killed in any line."""
    from reliq.ids import new_id

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
    from reliq.client.client import Clients
    from reliq.relay import mover as module
    from reliq.relay.mover import OutboxMover

    module.OVERDUE_SECONDS, module.OVERDUE_EVERY_SECONDS = 0.3, 0.1
    mover = OutboxMover(Relay(url, poll=0.02), Clients(None, ()))
    if "delete-first" in os.environ["MUTANTS"]:
        publish = mover.redis.publish

        def forget_first():
            mover.redis.sent, kept = list(mover.redis.unanswered), mover.redis.sent
            if mover.redis.sent:
                mover.store.begin()
                mover._note_answers()
                mover.store.commit()
            mover.redis.sent = kept
            return publish()

        mover.redis.publish = forget_first
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
            if job.once(tx) or "no-inbox" in os.environ["MUTANTS"]:
                tx.execute(f"INSERT INTO shipped VALUES ('{body['order']}')")
        time.sleep(random.random() * 0.05)  # most kills come here, after the commit and before the ack
        connections.append(connection)

    consumer.run(WorkerSettings(concurrency=4))


# ---- the run


class Run:
    """The processes, and what they have done."""

    def __init__(self, url, redis_url, mutants="") -> None:
        self.url = url
        path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
        self._environment = {**os.environ, "RELIQ_URL": redis_url, "MUTANTS": mutants, "PYTHONPATH": path}
        self._processes = {}
        with closing(connect(url)) as connection:
            if url.startswith("sqlite"):
                connection.execute("PRAGMA journal_mode=WAL")
            for statement in (*ddl("sqlite" if url.startswith("sqlite") else "postgresql"), *TABLES):
                connection.execute(statement)

    def start(self, role) -> None:
        command = [sys.executable, str(HERE), role.partition("-")[0], "--url", self.url]
        self._processes[role] = subprocess.Popen(command, env=self._environment, stderr=subprocess.DEVNULL)

    def kill(self, role) -> None:
        self._processes[role].kill()
        self._processes[role].wait()

    def kills(self, count, chance) -> None:
        """Kill processes one after another, each at a random moment of its life, and start another in its place."""
        for role in ROLES:
            self.start(role)
        self.wait_until(lambda: self.count("shipped") > 0, "the first order is shipped")
        for _ in range(count):
            role = chance.choice(ROLES)
            time.sleep(chance.uniform(0.0, 1.0))
            self.kill(role)
            self.start(role)
        self.kill("producer")

    def drain(self) -> dict:
        """Wait until every order that was committed is shipped; return what is wrong."""
        done = self.wait_until(lambda: self.missing() == 0 and self.unsent() == 0, "all are shipped", fail=False)
        for role in ROLES[1:]:
            self.kill(role)
        return {"drained": done, **self.verdict()}

    def verdict(self) -> dict:
        with closing(connect(self.url)) as connection:
            orders = [id for (id,) in connection.execute("SELECT id FROM orders").fetchall()]
            shipped = [id for (id,) in connection.execute("SELECT id FROM shipped").fetchall()]
        return {
            "orders": len(orders),
            "missing": len(set(orders) - set(shipped)),
            "twice": len(shipped) - len(set(shipped)),
            "phantom": len(set(shipped) - set(orders)),
        }

    def missing(self):
        return self.verdict()["missing"]

    def unsent(self):
        with closing(connect(self.url)) as connection:
            return connection.execute("SELECT count(*) FROM reliq_outbox WHERE sent_ms IS NULL").fetchone()[0]

    def count(self, table):
        with closing(connect(self.url)) as connection:
            return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    def wait_until(self, condition, what, seconds=40.0, *, fail=True):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                if fail:
                    raise TimeoutError(what)
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["postgresql", "sqlite", "producer", "relay", "worker"])
    parser.add_argument("--url")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", default="")
    given = parser.parse_args()
    if given.url:
        {"producer": produce, "relay": relay, "worker": work}[given.what](given.url)
        return
    with ExitStack() as stack:
        if given.what == "postgresql":
            from tests.postgres import Postgres

            url = stack.enter_context(Postgres()).url
        else:
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/shop.db"
        redis = stack.enter_context(EmbeddedRedis(port=None))
        run = stack.enter_context(closing(Run(url, redis.url, given.mutants)))
        began = time.monotonic()
        run.kills(given.kills, random.Random(given.seed))
        print(json.dumps({"kills": given.kills, "seconds": round(time.monotonic() - began, 1), **run.drain()}))


if __name__ == "__main__":
    main()
