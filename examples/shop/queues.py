"""The queues and message bodies of the shop, for publishers and workers."""

from dataclasses import dataclass

from reliq import Queue


@dataclass(frozen=True)
class Unpaid:
    """Close this order unless it is paid."""

    order: int


@dataclass(frozen=True)
class Mail:
    """Send this mail."""

    to: str
    subject: str
    text: str


@dataclass(frozen=True)
class Report:
    """Report the orders of this day, such as 2026-03-29."""

    day: str


CLOSING = Queue("shop.closing", Unpaid)
MAILS = Queue("shop.mails", Mail, retries=8)
REPORTS = Queue("shop.reports", Report)


def closing_id(order: int) -> str:
    """Return the id of the message that closes an order."""
    return f"close-{order}"
