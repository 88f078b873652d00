"""The handlers of the story: quick ones, and slow ones that wait at a gate."""

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from tenacity import wait_fixed

from reliq import Consumer, Queue, Relay
from reliq.outbox.tables import ddl

ORDERS = Queue("orders", str, retries=3)
REPORTS = Queue("reports", int)
#: A queue that nothing happens to, for what must stay as it is.
QUIET = Queue("quiet", int)

#: An outbox that is empty: its figures are there.
OUTBOX = Path(os.environ["STORY_GATE"]).with_name("outbox.db")
with closing(sqlite3.connect(OUTBOX)) as database:
    for statement in ddl("sqlite"):
        database.execute(statement)

consumer = Consumer(relay=Relay(f"sqlite:///{OUTBOX}"))


#: The leases are such as no busy machine outlasts.
@consumer.handler(ORDERS, lease=60, backoff=wait_fixed(0.1))
def orders(body: str) -> None:
    if body == "poison":
        raise ValueError("poison")


@consumer.handler(REPORTS, lease=60)
def reports(_number: int) -> None:
    while Path(os.environ["STORY_GATE"]).exists():
        threading.Event().wait(0.02)


@consumer.handler(QUIET, lease=60)
def quiet(_number: int) -> None: ...


#: It ticks all the time; what it publishes waits at the gate with the others, one at a time.
consumer.every(2, queue=REPORTS, body=0, name="heartbeat", overlap="skip")
