"""A message is published in the application's transaction: with it or not at all, with any database library."""

import asyncio
import subprocess
import sys
from contextlib import closing

import pytest
from databases import all_of, bodies, execute, rows_of, unsent
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from reliq import BodyError, ConfigurationError, Durability, Layout, Queue
from reliq.outbox import metadata
from reliq.outbox.tables import RowTerms, ddl

BODY = {"order": 42}
DRIVERS = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


def engine_url(database, driver=None):
    """Return the SQLAlchemy URL of a database."""
    scheme, _, rest = database.url.partition(":")
    return f"{driver or DRIVERS[scheme]}:{rest}"


def test_row_is_committed_with_its_transaction_and_then_published(database, tx, orders, mover):
    id = orders.publish_in(tx, BODY)
    assert rows_of(database) == []
    tx.commit()
    assert rows_of(database) == [("orders", id)]
    assert orders.counts().totals == {}

    assert mover().move_all() == 1

    with orders.receive() as [job]:
        assert (job.id, job.body) == (id, BODY)
    assert unsent(database) == 0


def test_rolled_back_savepoint_or_transaction_removes_its_row(database, tx, orders):
    kept = orders.publish_in(tx, BODY)
    tx.execute("SAVEPOINT one")
    orders.publish_in(tx, BODY)
    tx.execute("ROLLBACK TO SAVEPOINT one")
    tx.commit()
    orders.publish_in(tx, BODY)
    tx.rollback()
    tx.commit()

    assert rows_of(database) == [("orders", kept)]


def test_body_that_cannot_be_encoded_rolls_the_transaction_back(database, orders):
    def place(tx):
        with tx:
            tx.execute("INSERT INTO orders VALUES ('a')")
            orders.publish_in(tx, {"this": object()})

    with closing(database.connect()) as connection, pytest.raises(BodyError):
        place(connection)

    assert all_of(database, "SELECT * FROM orders") == rows_of(database) == []


def test_options_of_a_publish_are_stored_in_the_row(database, tx, url, orders, mover, client):
    bare = Queue("mails", bytes, url=url, layout=Layout.hdt3213())
    orders.publish_in(tx, BODY, id="order-42", retries=3, headers={"tenant": "a"}, dedup=7)
    orders.publish_in(tx, BODY, id="order-42")
    orders.publish_in(tx, BODY, delay=3600, durability=Durability.replicas(2, timeout=0.01))
    [(terms,)] = tx.execute("SELECT terms FROM reliq_outbox ORDER BY seq DESC LIMIT 1").fetchall()
    assert RowTerms.parse(terms).confirmation == Durability.replicas(2, timeout=0.01)
    id = bare.publish_in(tx, b"bare")
    tx.commit()

    assert mover().move_all() == 3  # no replica confirms the fourth

    assert (orders.counts().ready, orders.counts().pending) == (1, 1)
    with orders.receive() as [job]:
        assert (job.id, job.retries_left, job.headers) == ("order-42", 3, {"tenant": "a"})
    assert client.get(f"dp:mails:msg:{id}") == b"bare"


def test_tables_may_have_another_prefix_and_schema(database, orders, mover):
    prefix, schema = ("shop.reliq_", ["CREATE SCHEMA shop"]) if database.dialect == "postgresql" else ("shop_", [])
    execute(database, *schema, *ddl(database.dialect, prefix))
    with closing(database.connect()) as tx:
        orders.publish_in(tx, BODY, prefix=prefix)
        tx.commit()
    one = mover(prefix=prefix)

    assert one.move_all() == 1
    one.store.wait(0.0)
    assert bodies(orders) == [BODY]


# ---- invalid transactions


def test_connection_in_autocommit_is_refused_without_a_transaction(database, tx, orders):
    if database.dialect == "postgresql":
        tx.autocommit = True
        advice = "no transaction is open .*connection.transaction"
    else:
        tx.isolation_level = None
        advice = "BEGIN IMMEDIATE"

    with pytest.raises(ConfigurationError, match=advice):
        orders.publish_in(tx, BODY)
    tx.execute("BEGIN")
    orders.publish_in(tx, BODY)
    tx.execute("COMMIT")

    assert len(rows_of(database)) == 1


def test_object_that_is_no_transaction_is_refused_by_type(database, tx, orders):
    engine = create_engine(engine_url(database))
    refused = {
        None: "must be a Session",
        engine: "not sqlalchemy.engine.base.Engine",
        tx.cursor(): "not (psycopg|sqlite3)",
    }
    for wrong, said in refused.items():
        with pytest.raises(ConfigurationError, match=said):
            orders.publish_in(wrong, BODY)
    with pytest.raises(ConfigurationError, match="the transaction must be a Session"):
        asyncio.run(orders.apublish_in(None, BODY))
    with pytest.raises(ConfigurationError, match="leave out the `a`"):
        asyncio.run(orders.apublish_in(tx, BODY))


def test_missing_or_foreign_table_is_reported_with_the_command_for_it(database, tx, orders):
    tx.execute("CREATE TABLE foreign_outbox (id text)")
    for prefix in ("missing_", "foreign_"):
        with pytest.raises(ConfigurationError, match=f"no table {prefix}outbox with reliq's columns.*reliq outbox sql"):
            orders.publish_in(tx, BODY, prefix=prefix)
        tx.rollback()
        tx.execute("CREATE TABLE IF NOT EXISTS foreign_outbox (id text)")


def test_prefix_that_cannot_begin_a_table_name_is_refused(tx, orders):
    for prefix in ("", "a; DROP TABLE orders; --", "a.b.c", "x" * 41, None, 5, 'a"', "Shop_", "Shop.a_"):
        with pytest.raises(ConfigurationError, match="prefix must be the start of a table name"):
            orders.publish_in(tx, BODY, prefix=prefix)


# ---- SQLAlchemy, Django, Alembic


def test_sqlalchemy_sessions_and_connections_commit_and_roll_back_rows(database, orders):
    engine = create_engine(engine_url(database))
    with Session(engine) as session, session.begin():
        orders.publish_in(session, BODY)
    with engine.begin() as connection:
        orders.publish_in(connection, BODY)
    scoped = scoped_session(sessionmaker(engine))
    orders.publish_in(scoped, BODY)
    scoped.commit()
    scoped.remove()

    with Session(engine) as session:
        orders.publish_in(session, BODY)
        session.rollback()
    with Session(engine) as session, session.begin():
        nested = session.begin_nested()
        orders.publish_in(session, BODY)
        nested.rollback()
    engine.dispose()
    assert len(rows_of(database)) == 3


@pytest.mark.parametrize("library", ["sqlalchemy", "psycopg"])
def test_two_phase_transaction_takes_a_row_without_notify(postgresql, orders, library):
    if library == "psycopg":
        with closing(postgresql.connect()) as tx:
            tx.tpc_begin("order 42")
            orders.publish_in(tx, BODY)
            tx.tpc_prepare()
            tx.tpc_commit()
    else:
        engine = create_engine(engine_url(postgresql))
        with Session(engine, twophase=True) as session:
            orders.publish_in(session, BODY)
            session.commit()
        engine.dispose()

    assert unsent(postgresql) == 1


def test_sqlalchemy_session_in_autocommit_is_refused(database, orders):
    engine = create_engine(engine_url(database), isolation_level="AUTOCOMMIT")
    for session, said in (
        (Session(engine), "AUTOCOMMIT"),
        (engine.connect(), "AUTOCOMMIT"),
        (Session(binds={Session: engine}), "no default bind.*: give the"),
    ):
        with session, pytest.raises(ConfigurationError, match=said):
            orders.publish_in(session, BODY)
    engine.dispose()

    assert rows_of(database) == []


def test_sqlalchemy_without_greenlet_is_accepted(sqlite, orders):
    """SQLAlchemy 2.1 installs greenlet for its async part only."""
    program = f"""
import sys
sys.modules["greenlet"] = None
from reliq import Queue
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
with Session(create_engine("{sqlite.url}")) as session, session.begin():
    Queue("orders", dict, url="redis://127.0.0.1:1/0").publish_in(session, {{}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)

    assert len(rows_of(sqlite)) == 1


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg", "sqlite+aiosqlite"])
def test_async_sqlalchemy_sessions_and_connections_commit_rows(driver, request, orders):
    database = request.getfixturevalue(driver.partition("+")[0])
    url = engine_url(database, driver)

    async def publish():
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session, session.begin():
            await orders.apublish_in(session, BODY)
        async with engine.begin() as connection:
            await orders.apublish_in(connection, BODY)
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        await orders.apublish_in(scoped, BODY)
        await scoped.commit()
        await scoped.remove()
        async with AsyncSession(engine) as session:
            await orders.apublish_in(session, BODY)
            with pytest.raises(ConfigurationError, match="begins with `a`"):
                orders.publish_in(session, BODY)
        await engine.dispose()
        engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await orders.apublish_in(session, BODY)
        await engine.dispose()

    asyncio.run(publish())

    assert len(rows_of(database)) == 3


def test_connections_of_psycopg_with_any_cursor_class_commit_rows(postgresql, orders):
    from psycopg import AsyncConnection, AsyncRawCursor, RawCursor

    with postgresql.connect() as tx:
        tx.cursor_factory = RawCursor
        orders.publish_in(tx, BODY)

    async def publish(**options):
        async with await AsyncConnection.connect(postgresql.url, **options) as tx:
            await orders.apublish_in(tx, BODY)
            with pytest.raises(ConfigurationError, match="psycopg.Connection; in async code"):
                orders.publish_in(tx, BODY)

    asyncio.run(publish())
    asyncio.run(publish(cursor_factory=AsyncRawCursor))
    with pytest.raises(ConfigurationError, match=r"async with connection\.transaction"):
        asyncio.run(publish(autocommit=True))

    assert len(rows_of(postgresql)) == 3


def test_metadata_for_alembic_has_the_tables_of_the_sql(database, orders):
    """Alembic finds no difference between the metadata and the tables of the SQL."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = create_engine(engine_url(database))
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_name": lambda name, kind, _: name not in ("orders", "effects")}
        )
        assert compare_metadata(context, metadata()) == []
    metadata("made_").create_all(engine)
    with engine.begin() as connection:
        orders.publish_in(connection, BODY, prefix="made_")
    engine.dispose()


def test_generated_ids_spread_over_declared_shards_without_redis(sqlite):
    queue = Queue("orders", dict, url="redis://127.0.0.1:1/0", shards=4)
    with closing(sqlite.connect()) as tx:
        ids = [queue.publish_in(tx, BODY) for _ in range(4)]

    assert sorted(id.partition("~")[2] for id in ids) == ["", "1", "2", "3"]


DJANGO = """
import sys
import unittest
import django
from django.conf import settings

engine, name, *rest = sys.argv[1:]
options = dict(zip(("HOST", "PORT", "USER"), rest))
database = {"ENGINE": f"django.db.backends.{engine}", "NAME": name, **options}
settings.configure(DATABASES={"default": database}, INSTALLED_APPS=["reliq.contrib.django"], USE_TZ=True)
django.setup()

from django.core.management import call_command
from django.db import connection, transaction
from django.test import TestCase
from reliq import ConfigurationError, Queue

orders = Queue("orders", dict, url="redis://127.0.0.1:1/0")
call_command("migrate", verbosity=0)
with transaction.atomic():
    orders.publish_in(connection, {"order": 1})
    try:
        with transaction.atomic():
            orders.publish_in(connection, {"order": 2})
            raise KeyError
    except KeyError:
        pass
try:
    orders.publish_in(connection, {"order": 3})
except ConfigurationError as error:
    print(error)
with connection.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM reliq_outbox")
    print(cursor.fetchone()[0])


class ForgottenAtomic(TestCase):
    def test(self):  # Django begins a transaction of its own around it; production has none there
        refused = lambda: self.assertRaisesRegex(ConfigurationError, "atomic", orders.publish_in, connection, {})
        refused()
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            orders.publish_in(connection, {})
            transaction.on_commit(refused)


tests = unittest.defaultTestLoader.loadTestsFromTestCase(ForgottenAtomic)
assert unittest.TextTestRunner().run(tests).wasSuccessful()
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
call_command("migrate", "reliq", "zero", verbosity=0)
print(connection.introspection.table_names())
"""


@pytest.mark.slow
def test_django_commits_rows_within_atomic_and_migrates_the_tables(postgresql, tmp_path):
    execute(postgresql, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    server = ("postgresql", "postgres", "127.0.0.1", str(postgresql.server.port), "postgres")
    for words in (("sqlite3", str(tmp_path / "x.db")), server):
        done = subprocess.run([sys.executable, "-c", DJANGO, *words], capture_output=True, text=True, check=False)
        refused, count, left = done.stdout.splitlines() or [done.stderr] * 3
        assert "transaction.atomic()" in refused
        assert (count, left) == ("1", "['django_migrations']")
