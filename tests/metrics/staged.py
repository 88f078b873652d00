"""The handlers of the worker in test_story.py."""

import os
import sqlite3
from contextlib import closing

from tenacity import wait_fixed

from reliq import Consumer, Queue, Relay
from reliq.outbox.tables import ddl

ORDERS = Queue("orders", str, retries=3)
QUIET = Queue("quiet", int)
TENANTS = Queue("tenants", str)

OUTBOX = os.environ["STORY_OUTBOX"]
with closing(sqlite3.connect(OUTBOX)) as database:
    for statement in ddl("sqlite"):
        database.execute(statement)

consumer = Consumer(relay=Relay(f"sqlite:///{OUTBOX}"))


#: Leases that outlast delays of a busy machine.
@consumer.handler(ORDERS, lease=60, backoff=wait_fixed(0.1))
def orders(body: str) -> None:
    if body == "poison":
        raise ValueError("poison")


@consumer.handler(QUIET, lease=60)
def quiet(_number: int) -> None: ...


@consumer.handler(TENANTS, lease=60)
def tenants(_body: str) -> None: ...


consumer.every(2, queue=QUIET, body=0, name="heartbeat", overlap="skip")
