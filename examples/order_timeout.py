"""
Close orders that are not paid in time.

Each order publishes one delayed message, with the order's number as its id. A payment cancels it. When
the time is over, the handler closes the order: whatever process is alive then, and exactly when it is due.

    python examples/order_timeout.py [SECONDS]
"""

import sys
from dataclasses import dataclass

from stage import a_redis, print_account

from reliq import Consumer, Job, Queue


@dataclass(frozen=True)
class Unpaid:
    """The message: look whether this order was paid."""

    order: int


DEADLINES = Queue("order-deadlines", Unpaid)
consumer = Consumer()

#: What would be the shop's database: order -> state.
orders: dict[int, str] = {}


def place(order: int, pay_within: float) -> None:
    """Take an order, and have it closed if it is not paid within so many seconds."""
    orders[order] = "open"
    DEADLINES.publish(Unpaid(order), delay=pay_within, id=f"order-{order}")
    print(f"Order {order} is placed; it must be paid within {pay_within:g} s.")


def pay(order: int) -> None:
    """Take a payment; the deadline is no longer needed."""
    orders[order] = "paid"
    print(f"Order {order} is paid; its deadline: {DEADLINES.cancel(f'order-{order}')}.")


@consumer.handler(DEADLINES)
def close_unpaid(message: Unpaid, job: Job[Unpaid]) -> None:
    """
    Close an order unless it was paid.

    The message is a reminder, the database is the truth: a payment may have come in the same moment, and a message
    may be delivered twice. So the handler looks before it acts, and acting twice does no harm.
    """
    if orders[message.order] == "open":
        orders[message.order] = "closed"
        print(f"Order {message.order} is closed: not paid in time (attempt {job.attempt}).")


def main(pay_within: float) -> None:
    """Place six orders, pay two of them, and wait for the deadlines of the others."""
    with a_redis():
        for order in range(101, 107):
            place(order, pay_within)
        pay(102)
        pay(105)
        consumer.drain(delayed=True)  # a service would call consumer.run(), or be started by `reliq worker`
        print("In the end:", ", ".join(f"{order} {state}" for order, state in orders.items()))
        print_account(DEADLINES)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
