"""The web application of the shop. It publishes each message in the transaction of the order, so both commit together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from reliq import ReliqError
from shop.database import Order, Session, open_database
from shop.queues import CLOSING, MAILS, Mail, Unpaid, closing_id
from shop.settings import PAY_WITHIN


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Keep the database open while the server runs."""
    engine = open_database()
    yield
    engine.dispose()


app = FastAPI(title="Shop", lifespan=lifespan)


class NewOrder(BaseModel):
    """The body of a request to place an order."""

    email: str
    cents: int


@app.post("/orders", status_code=201)
def place(new: NewOrder) -> dict[str, int]:
    """Place an order, and publish two messages: a mail to the customer, and a delayed job that closes an unpaid order."""
    with Session.begin() as session:
        order = Order(email=new.email, cents=new.cents)
        session.add(order)
        session.flush()
        CLOSING.publish_in(session, Unpaid(order.number), id=closing_id(order.number), delay=PAY_WITHIN)
        MAILS.publish_in(session, Mail(order.email, f"Order {order.number}", "Thank you. Please pay soon."))
        return {"number": order.number}


@app.get("/orders/{number}")
def show(number: int) -> dict[str, str]:
    """Return the state of an order."""
    with Session() as session:
        order = session.get(Order, number)
        if order is None:
            raise HTTPException(404, "no such order")
        return {"state": order.state}


@app.post("/orders/{number}/payment")
def pay(number: int) -> dict[str, str]:
    """Mark an order as paid, unless it is closed."""
    with Session.begin() as session:
        order = session.get(Order, number, with_for_update=True)
        if order is None:
            raise HTTPException(404, "no such order")
        if order.state != "placed":
            raise HTTPException(409, f"the order is {order.state}")
        order.state = "paid"
        MAILS.publish_in(session, Mail(order.email, f"Order {number}", "It is paid and on its way."))
    with suppress(ReliqError):  # the cancel is optional: if the job runs, it finds that the order is paid
        CLOSING.cancel(closing_id(number))
    return {"state": "paid"}
