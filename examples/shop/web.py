"""The shop over HTTP. A message goes into the transaction of its order, so that neither is there without the other."""

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
    """Open the database as long as the server runs."""
    engine = open_database()
    yield
    engine.dispose()


app = FastAPI(title="Shop", lifespan=lifespan)


class NewOrder(BaseModel):
    """A customer's wish."""

    email: str
    cents: int


@app.post("/orders", status_code=201)
def place(new: NewOrder) -> dict[str, int]:
    """Place an order: it is closed later unless it is paid, and the customer gets a mail."""
    with Session.begin() as session:
        order = Order(email=new.email, cents=new.cents)
        session.add(order)
        session.flush()
        CLOSING.publish_in(session, Unpaid(order.number), id=closing_id(order.number), delay=PAY_WITHIN)
        MAILS.publish_in(session, Mail(order.email, f"Order {order.number}", "Thank you. Please pay soon."))
        return {"number": order.number}


@app.get("/orders/{number}")
def show(number: int) -> dict[str, str]:
    """Tell how an order stands."""
    with Session() as session:
        order = session.get(Order, number)
        if order is None:
            raise HTTPException(404, "no such order")
        return {"state": order.state}


@app.post("/orders/{number}/payment")
def pay(number: int) -> dict[str, str]:
    """Take the payment of an order that is not closed."""
    with Session.begin() as session:
        order = session.get(Order, number, with_for_update=True)
        if order is None:
            raise HTTPException(404, "no such order")
        if order.state != "placed":
            raise HTTPException(409, f"the order is {order.state}")
        order.state = "paid"
        MAILS.publish_in(session, Mail(order.email, f"Order {number}", "It is paid and on its way."))
    with suppress(ReliqError):  # it only spares a job: one that runs all the same finds the order paid
        CLOSING.cancel(closing_id(number))
    return {"state": "paid"}
