"""The handler of the incident: it cannot take a card without a number of its back, until it is mended."""

import os

from reliq import Consumer, Queue, Reject

ORDERS = Queue("orders")
consumer = Consumer()


@consumer.handler(ORDERS)
def charge(order: dict[str, str]) -> None:
    if "cvv" not in order["card"] and not os.environ.get("MENDED"):
        raise Reject(reason=f"card declined: no cvv in order {order['number']}")
