"""Test the shop with reliq's test kit."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from shop.jobs import consumer
from shop.queues import CLOSING, MAILS, Mail, Unpaid
from shop.settings import PAY_WITHIN

from reliq import Relay
from reliq.testing import DrainResult, Reliq

Work = Callable[..., DrainResult]
TWO_DAYS = timedelta(days=2)


def placed(shop: TestClient, email: str = "a@b.example", cents: int = 4200) -> int:
    """Place an order and return its number."""
    number: int = shop.post("/orders", json={"email": email, "cents": cents}).raise_for_status().json()["number"]
    return number


def state(shop: TestClient, number: int) -> str:
    """Return the state of an order."""
    return str(shop.get(f"/orders/{number}").json()["state"])


def test_an_order_is_to_be_closed_in_two_days_and_told_by_a_mail(shop: TestClient, reliq: Reliq, database: str) -> None:
    number, placed_at = placed(shop), reliq.now
    reliq.refute_published(CLOSING)  # before the relay has seen it

    reliq.relay(Relay(database))

    reliq.assert_published(CLOSING, Unpaid(number), id=f"close-{number}", due=placed_at + PAY_WITHIN)
    assert reliq.assert_published(MAILS).body.to == "a@b.example"


def test_an_unpaid_order_is_closed_after_two_days(
    shop: TestClient, reliq: Reliq, work: Work, mails: SimpleNamespace
) -> None:
    number = placed(shop)
    work()
    assert state(shop, number) == "placed"

    reliq.travel(TWO_DAYS)
    work()

    assert state(shop, number) == "closed"
    assert [mail["text"][:9] for mail in mails.inbox if mail["to"] == "a@b.example"] == ["Thank you", "You did n"]
    assert shop.post(f"/orders/{number}/payment").status_code == 409


def test_a_paid_order_is_not_closed_and_its_job_is_gone(shop: TestClient, reliq: Reliq, work: Work) -> None:
    number = placed(shop)
    work()

    shop.post(f"/orders/{number}/payment").raise_for_status()

    reliq.refute_published(CLOSING)
    reliq.travel(TWO_DAYS)
    work()
    assert state(shop, number) == "paid"


def test_a_job_that_could_not_be_cancelled_finds_the_order_paid(shop: TestClient, reliq: Reliq, work: Work) -> None:
    number = placed(shop)  # its job is still in the outbox, so it cannot be cancelled
    shop.post(f"/orders/{number}/payment").raise_for_status()

    work()
    reliq.travel(TWO_DAYS)
    assert f"close-{number}" in work().acked

    assert state(shop, number) == "paid"


def test_a_mail_is_tried_again_until_the_server_takes_it(shop: TestClient, work: Work, mails: SimpleNamespace) -> None:
    placed(shop)
    mails.answers += [503, 500]

    done = work(scheduled=True, fail_fast=False)

    assert len(done.nacked) == 2
    assert [mail["subject"] for mail in mails.inbox][:1] == ["Order 1"]


@pytest.mark.usefixtures("database")
def test_a_mail_that_is_delivered_twice_is_sent_once(reliq: Reliq, mails: SimpleNamespace) -> None:
    for attempt in (1, 2):
        mail = Mail("a@b.example", "Hello", "…")
        reliq.perform(consumer, MAILS, mail, id="a-mail", publication_id=1, attempt=attempt, state=mails.server)

    assert len(mails.inbox) == 1


def test_the_boss_is_told_of_the_day_before(shop: TestClient, reliq: Reliq, work: Work, mails: SimpleNamespace) -> None:
    placed(shop, cents=1000)
    shop.post(f"/orders/{placed(shop, cents=250)}/payment").raise_for_status()
    work()

    for _ in range(2):  # two mornings, because the first report can be about the day before the orders
        reliq.travel(timedelta(days=1))
        work()

    [told] = [mail["text"] for mail in mails.inbox if mail["to"].startswith("boss") and "none" not in mail["text"]]
    assert "1 paid, 2.50 €" in told
    assert "10.00 €" in told


def test_what_fails_is_rolled_back_with_its_messages(
    shop: TestClient, reliq: Reliq, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAILS, "publish_in", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        placed(shop)

    assert reliq.relay(Relay(database)) == 0
    assert shop.get("/orders/1").status_code == 404
