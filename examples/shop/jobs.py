"""
The handlers of the shop.

Each handler calls `job.once` in the transaction of its effects, so a message that runs twice changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import httpx
from sqlalchemy import func, select

from reliq import Consumer, Job, Reject, Relay
from shop.database import Order, Session, open_database
from shop.queues import CLOSING, MAILS, REPORTS, Mail, Report, Unpaid
from shop.settings import BOSS, DATABASE, MAIL_HOOK

ZONE = "Europe/Berlin"


@contextmanager
def lifespan() -> Iterator[httpx.Client]:
    """Open the database, and a client of the mail server, which handlers get as `job.state`."""
    engine = open_database()
    with httpx.Client(base_url=MAIL_HOOK, timeout=5) as mail_server:
        yield mail_server
    engine.dispose()


consumer = Consumer(lifespan=lifespan, relay=Relay(DATABASE))


@consumer.handler(CLOSING)
def close_unpaid(unpaid: Unpaid, job: Job[Unpaid]) -> None:
    """Close an order that is not paid."""
    with Session.begin() as session:
        if not job.once(session):
            return
        order = session.get(Order, unpaid.order, with_for_update=True)
        if order is None:
            raise Reject(reason="no such order")
        if order.state == "placed":
            order.state = "closed"
            MAILS.publish_in(session, Mail(order.email, f"Order {order.number}", "You did not pay: it is closed."))


@consumer.handler(MAILS, timeout=60)
def send(mail: Mail, job: Job[Mail]) -> None:
    """Send a mail to the mail server."""
    with Session.begin() as session:
        if not job.once(session):
            return
        # If this process dies before the commit, the mail is sent again. By this key, the server ignores the second mail.
        letter = {"to": mail.to, "subject": mail.subject, "text": mail.text}
        job.state.post("/mails", json=letter, headers={"Idempotency-Key": job.id}).raise_for_status()


@consumer.cron("0 6 * * *", queue=REPORTS, tz=ZONE)
def nightly_report(tick: datetime) -> Report:
    """Return the report job for the previous day; it is published each morning at six."""
    return Report((tick.date() - timedelta(days=1)).isoformat())


@consumer.handler(REPORTS)
def write_report(report: Report, job: Job[Report]) -> None:
    """Send the boss a mail with the number and sum of the orders of a day, by state."""
    day = date.fromisoformat(report.day)
    begins = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(ZONE)).astimezone(UTC)
    its = (begins <= Order.placed) & (Order.placed < begins + timedelta(days=1))
    with Session.begin() as session:
        if not job.once(session):
            return
        rows = session.execute(
            select(Order.state, func.count(), func.sum(Order.cents)).where(its).group_by(Order.state)
        )
        lines = [f"{count} {state}, {cents / 100:.2f} €" for state, count, cents in rows]
        MAILS.publish_in(session, Mail(BOSS, f"Orders of {day}", "\n".join(lines) or "There was none."))
