"""What happens later. Each handler commits its effects and a note of its message together, so that it has them once."""

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
    """Give each worker process the database, and the connection to the mail server as `job.state`."""
    engine = open_database()
    with httpx.Client(base_url=MAIL_HOOK, timeout=5) as mail_server:
        yield mail_server
    engine.dispose()


consumer = Consumer(lifespan=lifespan, relay=Relay(DATABASE))


@consumer.handler(CLOSING)
def close_unpaid(unpaid: Unpaid, job: Job[Unpaid]) -> None:
    """Close an order that nobody has paid."""
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
    """Hand a mail to the mail server."""
    with Session.begin() as session:
        if not job.once(session):
            return
        # Should this process die before the commit, the server knows the mail by its key.
        letter = {"to": mail.to, "subject": mail.subject, "text": mail.text}
        job.state.post("/mails", json=letter, headers={"Idempotency-Key": job.id}).raise_for_status()


@consumer.cron("0 6 * * *", queue=REPORTS, tz=ZONE)
def nightly_report(tick: datetime) -> Report:
    """Report on the day before, each morning at six."""
    return Report((tick.date() - timedelta(days=1)).isoformat())


@consumer.handler(REPORTS)
def write_report(report: Report, job: Job[Report]) -> None:
    """Tell the boss how the orders of a day stand."""
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
