"""A message's effects happen once, however often it is delivered, and its follow-ups are published once."""

import asyncio
import threading
from contextlib import closing

import pytest
from databases import all_of, execute
from transition import run_transition
from waiting import eventually

from reliq import BodyError, ConfigurationError, Consumer, Layout, Queue, Reject
from reliq.admin import Admin
from reliq.handlers.effects import inbox_keep_ms
from reliq.settings import HandlerSettings, QueueSettings

DAY_MS = 86_400_000
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'"


def effect(tx, job):
    """The handler of an order: its only effect is a row of the application."""
    if tx.__class__.__module__ == "sqlite3":
        tx.execute("BEGIN IMMEDIATE")
    if not job.once(tx):
        return False
    tx.execute(f"INSERT INTO effects VALUES ('{job.id}')")
    return True


def made(database):
    return sorted(id for (id,) in all_of(database, "SELECT id FROM effects"))


def test_message_delivered_again_has_its_effect_only_when_it_was_rolled_back(database, tx, orders):
    orders.publish({}, id="order-1")
    for end, expected in ((tx.rollback, True), (tx.commit, True), (tx.commit, False)):
        with orders.receive(wait=30) as [job]:
            assert effect(tx, job) == expected
            end()
            job.nack(delay=0)

    assert made(database) == ["order-1"]


def test_later_message_with_the_same_chosen_id_has_its_own_effect_and_follow_up(database, tx, url):
    """The id alone is not enough: the second message would be skipped."""
    reports, mails = Queue("reports", dict, url=url, dedup=0.001), Queue("mails", dict, url=url)
    for _ in range(2):
        eventually(lambda: reports.publish({}, id="daily"), "the id is free")
        with reports.receive(wait=30) as [job]:
            assert effect(tx, job)
            assert job.publish(mails, {})
        tx.commit()

    assert (made(database), mails.counts().ready) == (["daily", "daily"], 2)


def test_redriven_letter_has_its_effect_once(database, tx, orders):
    orders.publish({}, id="order-1")
    publication_ids = set()
    for end, expected in ((tx.rollback, True), (tx.commit, True), (tx.commit, False)):
        with orders.receive(wait=30) as [job]:
            assert effect(tx, job) == expected
            end()
            job.reject(reason="card")
        publication_ids.add(job.publication_id)
        collect(orders)
        assert orders.redrive(orders.dead_letters()) == 1

    assert (made(database), len(publication_ids)) == (["order-1"], 1)


def test_moved_message_has_its_effect_and_follow_up_once(database, tx, url, orders):
    """The message is moved during its backoff, and its dead letter is redriven to a third queue."""
    other, third, mails = (Queue(name, dict, url=url) for name in ("other", "third", "mails"))
    for known in (other, third):
        known.publish({}, id="x")
        known.cancel("x")
    seen = []

    def deliver(queue):
        with queue.receive(wait=30) as [job]:
            seen.append((effect(tx, job), bool(job.publish(mails, {}))))
            tx.commit()
            job.nack(delay=600) if queue is orders else job.reject(reason="card")

    orders.publish({}, id="order-1")
    deliver(orders)
    admin = Admin(url)
    assert admin.move("orders", "other", "unack").done == 1
    other.reschedule("order-1")
    deliver(other)
    collect(other)
    assert admin.redrive("other", to="third").done == 1
    deliver(third)

    assert seen == [(True, True), (False, False), (False, False)]


def collect(queue):
    run_transition(queue, "collect", ["order-1"], dead_letter_limit=10, letters_ms=DAY_MS)


def test_concurrent_deliveries_have_the_effect_once(postgresql, url):
    """The second delivery waits for the first; if the first rolls back, the second makes the effect."""
    queue = Queue("orders", dict, url=url)
    for first_end, expected in (("commit", False), ("rollback", True)):
        queue.publish({})
        with queue.receive() as [job], closing(postgresql.connect()) as one, closing(postgresql.connect()) as other:
            assert effect(one, job)
            said = []
            thread = threading.Thread(target=lambda: said.append(effect(other, job)) or other.commit())  # noqa: B023
            thread.start()
            eventually(lambda: all_of(postgresql, WAITING) == [(1,)], "the second waits")
            getattr(one, first_end)()
            thread.join(30)
            assert said == [expected]

    assert len(made(postgresql)) == 2


def test_async_code_uses_the_inbox(database, orders):
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    driver = {"postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}[database.dialect]
    engine = create_async_engine(driver + database.url[database.url.index(":") :])

    async def run():
        orders.publish({})
        for expected in (True, False):
            async with orders.areceive(wait=30) as [job]:
                async with AsyncSession(engine) as session, session.begin():
                    assert await job.aonce(session) == expected
                    if expected:
                        await session.execute(text("INSERT INTO effects VALUES (:id)"), {"id": job.id})
                job.nack(delay=0)
        await engine.dispose()

    asyncio.run(run())

    assert len(made(database)) == 1


def test_inbox_refuses_wrong_calls_and_connections_without_a_transaction(postgresql, orders):
    """`aonce` without `await` would be true: every delivery would repeat the effects."""
    import psycopg

    orders.publish({})
    with orders.receive(wait=30) as [job], psycopg.connect(postgresql.url, autocommit=True) as tx:
        with pytest.raises(TypeError, match="`await` is missing"):
            assert not job.aonce(None)
        with pytest.raises(ConfigurationError, match="no transaction is open"):
            job.once(tx)
        with pytest.raises(ConfigurationError, match="no table other_inbox"), tx.transaction():
            job.once(tx, prefix="other_")
        with pytest.raises(ConfigurationError, match="keep must be"), tx.transaction():
            job.once(tx, keep=0)


def test_inbox_row_stays_while_its_message_can_be_delivered(database, tx, url, mover):
    settings = QueueSettings(ttl=3600, dead_letter_ttl=7200, retries=0)
    kept = inbox_keep_ms(settings, HandlerSettings())
    assert kept == 2 * 3_600_000 + 7_200_000 + DAY_MS
    queue = Queue("orders", dict, url=url, ttl=3600, dead_letter_ttl=7200, retries=0)
    queue.publish({})
    queue.publish({})
    with queue.receive(limit=2) as [one, other]:
        one.once(tx)
        other.once(tx, keep=60)
        tx.commit()

    def cleaned(ms):
        execute(database, f"UPDATE reliq_inbox SET keep_until_ms = keep_until_ms - {ms}")
        return mover().store.clean(0)[1]

    assert [cleaned(0), cleaned(61_000), cleaned(kept - 121_000)] == [0, 1, 0]
    assert not one.once(tx, keep=1)  # as for a second delivery, which may become a dead letter and be redriven
    assert not one.once(tx)
    tx.commit()
    assert [cleaned(kept - 60_000), cleaned(61_000)] == [0, 1]


def test_inbox_row_stays_for_the_longest_backoffs():
    short, long = (inbox_keep_ms(QueueSettings(retries=retries), HandlerSettings()) for retries in (1, 100))

    assert long - short > 99 * 1800 * 1000


# ---- follow-ups


def test_job_that_runs_twice_publishes_its_follow_ups_once(url, orders):
    mails = Queue("mails", dict, url=url)
    orders.publish({})
    for expected in (True, False):
        with orders.receive(wait=30) as [job]:
            assert bool(job.publish(mails, {"to": "a"})) == expected
            assert bool(job.publish(mails, {"to": "b"})) == expected
            assert bool(job.publish(mails, {"to": "c"}, name="receipt", delay=60)) == expected
            assert bool(job.publish(orders, {"to": "a"}, name="1", delay=60)) == expected
            job.nack(delay=0)

    assert (mails.counts().ready, mails.counts().pending) == (2, 1)


def test_repeated_follow_up_is_the_same_message_for_its_inbox(database, tx, url, orders):
    mails = Queue("mails", dict, url=url)
    orders.publish({})
    done = []
    for _ in range(2):
        with orders.receive(wait=30) as [job]:
            eventually(lambda job=job: job.publish(mails, {}, name="x", dedup=0.001), "it is published again")
            job.nack(delay=0)
        with mails.receive(wait=30) as [mail]:
            done.append(effect(tx, mail))
            tx.commit()

    assert done == [True, False]


def test_handler_in_a_worker_uses_inbox_and_follow_ups(database, url, orders):
    mails, seen, done = Queue("mails", dict, url=url), [], threading.Event()
    consumer = Consumer(url)

    @consumer.handler(orders)
    def ship(body, job):
        with closing(database.connect()) as tx:
            seen.append((effect(tx, job), bool(job.publish(mails, body)), job.token, job.publication_id))
            tx.commit()
        if len(seen) == 1:
            raise Reject(reason="a death after the commit")

    @consumer.handler(mails)
    async def send(body, job):
        assert job.token > 0
        assert not await job.apublish(mails, body, delay=0, name="again") or done.set() is None

    consumer.start()
    orders.publish({"order": 1})
    eventually(orders.dead_letters, "it is dead")
    orders.redrive(orders.dead_letters())
    eventually(lambda: len(seen) == 2, "it runs again")
    assert done.wait(60)
    consumer.stop()

    (first, one, token, publication_id), (second, other, later, same) = seen
    assert (first, second, one, other) == (True, False, True, False)
    assert later > token
    assert same == publication_id


def test_bad_option_of_a_follow_up_is_refused(orders):
    orders.publish({})
    with orders.receive(wait=30) as [job]:
        for options in ({"id": "x"}, {"publication_id": 1}, {"name": "a b"}, {"name": "x" * 65}, {"retries": -1}):
            with pytest.raises(ConfigurationError):
                job.publish(orders, {}, **options)
        with pytest.raises(BodyError):
            job.publish(orders, {"this": object()})
    with pytest.raises(ConfigurationError, match="publication_id must be"):
        orders.publish({}, id="a", publication_id=2**53)
    with pytest.raises(ConfigurationError, match="publication_id needs an id"):
        orders.publish({}, publication_id=1)


def test_message_in_the_go_layout_has_no_incarnation(url):
    queue = Queue("mails", bytes, url=url, layout=Layout.hdt3213())
    queue.publish(b"x", id="chosen")
    with queue.receive() as [job]:
        assert job.publication_id == 0
    with pytest.raises(ConfigurationError, match="publication_id cannot be sent"):
        queue.publish(b"x", id="chosen", publication_id=1)
