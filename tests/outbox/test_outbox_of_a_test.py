"""The test kit moves a test's outbox rows within the test's transaction, and commits nothing."""

import asyncio
import datetime as dt

import pytest
from databases import rows_of, unsent
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from reliq import ConfigurationError, Consumer, Queue, Relay
from reliq.testing import isolated

ORDERS, MAILS = Queue("orders", int), Queue("mails", str)


@pytest.fixture
def reliq():
    with isolated() as kit:
        yield kit


def driven(database, driver):
    """Return the SQLAlchemy URL of a database."""
    return database.url.replace("postgresql", "postgresql+psycopg").replace("sqlite", f"sqlite{driver}")


@pytest.mark.parametrize("rows", ["tuples", "dicts"])
def test_kit_publishes_rows_of_an_open_transaction(database, tx, reliq, rows):
    id = ORDERS.publish_in(tx, 1, delay=dt.timedelta(days=2))
    if rows == "dicts":
        tx.row_factory = dict_row if database.dialect == "postgresql" else lambda cursor, row: {"row": row}

    assert (reliq.relay(tx), reliq.relay(tx)) == (1, 0)

    assert reliq.assert_published(ORDERS, 1, state="pending").id == id
    tx.rollback()
    assert rows_of(database) == []


def test_drain_moves_rows_of_handlers_in_the_session_of_the_test(database, reliq):
    engine, consumer, seen = create_engine(driven(database, "")), Consumer(), []
    with engine.connect() as connection, Session(connection) as session:

        @consumer.handler(ORDERS)
        def close(number):
            session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": str(number)})
            MAILS.publish_in(session, f"closed {number}")

        consumer.handler(MAILS)(seen.append)
        ORDERS.publish_in(session, 7)

        done = reliq.drain(consumer, outbox=session)

        assert (len(done.acked), seen) == (2, ["closed 7"])
        assert session.execute(text("SELECT id FROM orders")).all() == [("7",)]
    engine.dispose()
    assert rows_of(database) == []


def test_async_drain_moves_rows_of_an_async_session(database, reliq):
    consumer, seen = Consumer(), []
    consumer.handler(ORDERS)(seen.append)

    async def test():
        engine = create_async_engine(driven(database, "+aiosqlite"))
        async with AsyncSession(engine) as session:
            await ORDERS.apublish_in(session, 7)
            with pytest.raises(ConfigurationError, match=r"in async code `await reliq.arelay\(session\)`"):
                reliq.relay(session)
            await reliq.adrain(consumer, outbox=session)
            await session.rollback()
        await engine.dispose()

    asyncio.run(test())

    assert seen == [7]
    assert rows_of(database) == []


def test_drain_with_a_relay_moves_committed_rows(database, tx, reliq):
    consumer, seen = Consumer(), []
    consumer.handler(ORDERS)(seen.append)
    ORDERS.publish_in(tx, 7)
    tx.commit()

    reliq.drain(consumer, outbox=Relay(database.url))

    assert (seen, unsent(database)) == ([7], 0)
