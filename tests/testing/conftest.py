"""Fixtures of the test kit's tests: a small application, and the kit on a database of the server under test."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import redis
from tenacity import wait_fixed

from reliq import Consumer, Job, Nack, Queue, Reject, Snooze
from reliq.testing import isolated

#: Other fixtures use database 0.
DATABASE = 7


@dataclass(frozen=True)
class Order:
    number: int


@pytest.fixture
def kit_url(redis_server):
    url = f"redis://127.0.0.1:{redis_server.port}/{DATABASE}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def reliq(kit_url):
    with isolated(kit_url) as kit:
        yield kit


@pytest.fixture
def shop():
    """An application that closes orders and sends mails; the order's number decides the handler's answer."""
    orders = Queue("orders", Order, retries=3, dedup=600)
    mails = Queue("mails", str, url="redis://production.example:6379/0")
    consumer, seen = Consumer(), []

    @consumer.handler(orders, backoff=wait_fixed(3600))
    def close(order: Order, job: Job[Order]) -> None:
        if order.number == 13:
            raise ValueError("thirteen")
        if order.number == 7 and job.attempt < 3:
            raise Nack(reason="later")
        if order.number == 5 and job.attempt == 1 and len(seen) < 2:
            raise Snooze(delay=60)
        if order.number < 0:
            raise Reject(reason="no such order")
        seen.append((order.number, job.attempt))
        mails.publish(f"closed {order.number}")

    @consumer.handler(mails)
    async def send(text: str) -> None:
        seen.append(text)

    return SimpleNamespace(orders=orders, mails=mails, consumer=consumer, seen=seen, Order=Order)
