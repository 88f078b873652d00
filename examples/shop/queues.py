"""The messages of the shop, for who publishes and who handles them."""

from dataclasses import dataclass

from reliq import Queue


@dataclass(frozen=True)
class Unpaid:
    """An order that is to be closed unless it is paid by now."""

    order: int


@dataclass(frozen=True)
class Mail:
    """One mail."""

    to: str
    subject: str
    text: str


@dataclass(frozen=True)
class Report:
    """A day whose orders are to be reported, as 2026-03-29."""

    day: str


CLOSING = Queue("shop.closing", Unpaid)
MAILS = Queue("shop.mails", Mail, retries=8)
REPORTS = Queue("shop.reports", Report)


def closing_id(order: int) -> str:
    """Return the id of the message that closes an order."""
    return f"close-{order}"
