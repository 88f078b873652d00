"""A relay moves each committed row to Redis once, whatever ends it, and however late the next one comes."""

import threading
from contextlib import closing

import pytest
from databases import all_of, bodies, unsent
from ports import free_port
from waiting import eventually

from reliq import ConfigurationError, Consumer, Durability, Queue, Relay, events
from reliq.errors import RedisUnavailableError
from reliq.ids import home
from reliq.outbox.store import Store
from reliq.shardmap import ShardMap
from reliq.transitions import CallNumber

BODY = {"order": 42}


def publish(database, queue, *many, **options):
    """Publish bodies in a transaction of their own; return their ids."""
    with closing(database.connect()) as tx:
        ids = [queue.publish_in(tx, body, **options) for body in many or [BODY]]
        tx.commit()
    return ids


def shift(database, column, ms):
    """Have the rows written, or the calls made, so long ago."""
    table = {"made_ms": "reliq_outbox", "called_ms": "reliq_outbox_calls", "sent_ms": "reliq_outbox"}[column]
    with closing(database.connect()) as tx:
        tx.execute(f"UPDATE {table} SET {column} = {column} - {ms}")
        tx.commit()


class DiesError(Exception):
    """The process ends here."""


@pytest.fixture
def dies_before_noting(monkeypatch):
    """Have the next relay end after Redis has its rows, and before the database knows."""

    def die(mover):
        monkeypatch.setattr(mover, "_take", lambda _: (_ for _ in ()).throw(DiesError))
        mover.redis.sent.clear()
        mover.store.database.close()

    return die


def test_rows_are_published_in_their_order_and_stay_for_a_while(database, orders, mover):
    publish(database, orders, *({"n": n} for n in range(7)))

    assert mover(batch=3).move_all() == 7

    assert bodies(orders) == [{"n": n} for n in range(7)]
    assert unsent(database) == 0
    assert all_of(database, "SELECT count(*) FROM reliq_outbox") == [(7,)]
    assert all_of(database, "SELECT count(*) FROM reliq_outbox_calls") == [(0,)]


def test_rows_that_are_not_to_be_kept_are_deleted(database, orders, mover):
    publish(database, orders)

    mover(keep=0).move_all()

    assert all_of(database, "SELECT count(*) FROM reliq_outbox") == [(0,)]


def test_a_message_of_a_relay_costs_redis_what_a_publish_costs(database, orders, mover, client):
    """No id is remembered after its end: that a row is not sent twice is known by the number of its call."""
    publish(database, orders)
    mover().move_all()
    bodies(orders)

    names = {key.decode().partition("}:")[2].partition(":")[0] for key in client.scan_iter("{reliq:orders}*")}
    assert {"dd", "windows", "msg"} & names == set()
    lanes = [key for key in client.scan_iter("*:lane:*") if client.pttl(key) > 29 * 86_400_000]
    assert len(lanes) == 1


def test_a_row_committed_late_with_a_lower_number_is_moved(postgresql, orders, url):
    from reliq.client.client import Clients
    from reliq.relay.mover import OutboxMover

    mover = OutboxMover(Relay(postgresql.url), Clients(url, ()))
    with closing(postgresql.connect()) as late, closing(postgresql.connect()) as early:
        orders.publish_in(late, {"which": "late"})
        orders.publish_in(early, {"which": "early"})
        early.commit()
        assert mover.move_all() == 1
        late.commit()
        assert mover.move_all() == 1
    mover.close()

    assert bodies(orders) == [{"which": "early"}, {"which": "late"}]


def test_a_delay_of_ten_seconds_that_is_relayed_after_seven_is_due_in_three(database, orders, mover, client):
    publish(database, orders, delay=10)
    shift(database, "made_ms", 7000)

    mover().move_all()

    [(_, due)] = client.zrange("{reliq:orders}:pending", 0, 0, withscores=True)
    seconds, micros = client.time()
    assert 1.0 < due - (seconds + micros / 1e6) <= 3.01


def test_a_delay_goes_on_while_redis_is_away(database, orders, mover, monkeypatch):
    publish(database, orders, delay=10)
    one = mover()
    one._take(10.0)
    [sending] = one.redis.unanswered
    sending.taken_at -= 7.0

    assert 2900 <= sending.call().args[3] <= 3000


def test_delays_that_are_near_each_other_share_a_call(database, orders, mover):
    publish(database, orders, *[BODY] * 50, delay=3600)
    one = mover()
    one._take(10.0)

    assert 1 <= len(one.redis.unanswered) <= 3


@pytest.mark.parametrize("acked", [False, True], ids=["alive", "acked"])
def test_a_relay_that_died_before_the_database_knew_is_followed_by_one_that_publishes_nothing_twice(
    database, orders, mover, dies_before_noting, acked
):
    publish(database, orders, BODY, {"order": 43})
    first, second = mover(), mover()
    first.move()
    dies_before_noting(first)
    if acked:
        assert len(bodies(orders)) == 2
    assert unsent(database) == 2

    second.move_all()

    assert unsent(database) == 0
    assert orders.counts().totals["published"] == 2


def test_a_late_relay_publishes_nothing_twice_even_after_the_window_of_every_id(
    database, url, mover, client, dies_before_noting
):
    """Without the number of its call this would be published again: the id is free by then."""
    queue = Queue("orders", dict, url=url, dedup=0.001)
    publish(database, queue)
    publish(database, queue, id="chosen")
    first, second = mover(), mover()
    first.move()
    dies_before_noting(first)
    assert len(bodies(queue)) == 2
    eventually(lambda: not list(client.scan_iter("*:dd:*")), "the window is over")
    shift(database, "called_ms", 7 * 86_400_000)

    second.move_all()

    assert queue.counts().totals["published"] == 2


def test_a_relay_that_died_before_it_published_is_followed_by_one_that_does(database, orders, mover):
    publish(database, orders)
    dead, other = mover(), mover()
    dead._take(10.0)
    dead.store.database.close()

    assert other.move() == 0  # it may yet come back
    shift(database, "called_ms", 60_000)
    other._due["overdue"] = 0.0
    assert other.move() == 1
    assert len(bodies(orders)) == 1


def test_a_relay_that_comes_back_after_another_took_over_publishes_nothing_twice(database, orders, mover):
    publish(database, orders)
    stalled, other = mover(), mover()
    stalled._take(10.0)
    other.move_all()
    assert bodies(orders) == [BODY]

    assert stalled.move_all() == 1

    assert orders.counts().totals["published"] == 1
    publish(database, orders, {"order": 43})
    stalled.move_all()
    assert bodies(orders) == [{"order": 43}]


def test_who_makes_a_call_again_after_its_lane_had_a_later_one_knows_that_it_was_made(database, orders, mover):
    publish(database, orders)
    owner, late = mover(), mover()
    owner._take(10.0)
    late._take(0.0)  # it has the same call in hand
    owner.move_all()
    publish(database, orders, {"order": 43})
    owner.move_all()

    assert late.move_all() == 1

    assert orders.counts().totals["published"] == 2


def test_two_relays_move_each_row_once(database, orders, mover):
    publish(database, orders, *({"n": n} for n in range(300)))
    movers = [mover(batch=7), mover(batch=11)]

    threads = [threading.Thread(target=one.move_all) for one in movers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    movers[0].move_all()
    assert sorted(body["n"] for body in bodies(orders)) == list(range(300))


def test_redis_that_lost_its_writes_gets_them_again(database, orders, mover, client):
    publish(database, orders, {"n": 1})
    mover().move_all()
    shift(database, "sent_ms", 3_600_000)
    publish(database, orders, {"n": 2}, {"n": 3})
    one = mover()
    one.move_all()
    client.flushall()

    assert one.store.again(600_000) == 2
    assert one.move_all() == 2

    assert bodies(orders) == [{"n": 2}, {"n": 3}]


def test_what_redis_did_not_lose_is_not_published_again(database, orders, mover):
    """It is alive: a second place in a list would deliver it twice."""
    [id] = publish(database, orders)
    one = mover()
    one.move_all()

    one.store.again(600_000)
    one.move_all()

    assert orders.counts().totals["published"] == 1
    with orders.receive() as [job]:
        assert job.id == id


# ---- trouble


def test_rows_of_a_queue_that_redis_refuses_stay_and_do_not_hold_up_others(database, url, orders, mover, client):
    spoilt = Queue("spoilt", dict, url=url)
    client.set("{reliq:spoilt}:ready", "no list")
    publish(database, spoilt, *[BODY] * 3)
    publish(database, orders, *[BODY] * 3)
    one = mover(batch=2)

    assert one.move_all() == 3
    assert one.move_all() == 0
    assert unsent(database) == 3

    client.delete("{reliq:spoilt}:ready")
    one._due["overdue"] = 0.0
    assert one.move_all() == 3


def test_a_row_that_can_be_published_nowhere_is_refused_once_with_its_reason(database, orders, mover, caplog):
    with closing(database.connect()) as tx:
        columns = "INSERT INTO reliq_outbox (queue, id, value, terms, made_ms) VALUES"
        tx.execute(f"{columns} ('no queue', 'a', '', '{{}}', 0)")
        tx.execute(f"{columns} ('orders', 'b c', '', '{{\"ttl_ms\":5,\"retries\":1}}', 0)")
        tx.execute(f"{columns} ('orders', 'c', '', '{{\"ttl_ms\":5,\"retries\":1,\"later\":1}}', 0)")
        tx.commit()
    publish(database, orders)

    assert mover().move_all() == 1
    assert mover().move_all() == 0

    notes = [note for (note,) in all_of(database, "SELECT note FROM reliq_outbox ORDER BY seq")]
    assert [note.startswith("refused: ") for note in notes] == [True, True, True, False]
    assert len([one for one in caplog.records if "cannot be published" in one.message]) == 3


def test_while_redis_is_away_no_transaction_is_open_and_nothing_is_lost(database, orders, mover, client):
    publish(database, orders)
    one = mover()
    client.config_set("maxclients", 1)
    try:
        one.redis._clients.connection().close()
        with pytest.raises(RedisUnavailableError):
            one.move()
    finally:
        client.config_set("maxclients", 10_000)
    with closing(database.connect()) as tx:
        tx.execute("INSERT INTO orders VALUES ('a')")
        tx.commit()

    assert one.move_all() == 1
    assert bodies(orders) == [BODY]


def test_a_database_that_is_away_is_told_once_and_tried_until_it_is_back(tmp_path, url, orders, caplog):
    from databases import Sqlite

    from reliq.client.client import Clients
    from reliq.relay.mover import OutboxMover

    seen = []
    mover = OutboxMover(Relay(f"sqlite:///{tmp_path}/late.db", poll=0.01), Clients(url, [seen.append]))
    caplog.set_level("INFO")

    assert mover.step() > 0
    assert mover.step() > 0
    publish(Sqlite(tmp_path / "late.db"), orders)
    assert mover.step() == 0.0
    mover.close()

    assert bodies(orders) == [BODY]
    kinds = [type(one) for one in seen]
    assert kinds.count(events.DatabaseAway) == 2
    assert kinds.count(events.DatabaseBack) == 1
    said = [one.message for one in caplog.records if one.name.startswith("reliq.relay")]
    assert ["away" in line for line in said] == [True, False]


def test_postgresql_that_ends_and_comes_back_loses_nothing(url, orders):
    from databases import Postgresql

    from reliq.client.client import Clients
    from reliq.relay.mover import OutboxMover
    from tests.postgres import Postgres, programs

    if programs() is None:
        pytest.fail("see the fixture postgres")
    with Postgres() as server:
        database = Postgresql(server)
        mover = OutboxMover(Relay(server.url, poll=0.01), Clients(url, ()))
        publish(database, orders)
        assert mover.step() == 0.0
        server.stop(2)
        assert mover.step() > 0
        server.start()
        eventually(lambda: mover.step() == 0.0, "the relay has its database back")
        publish(database, orders)
        eventually(lambda: mover.step() == 0.0 and orders.counts().ready == 2, "the second is moved")
        mover.close()


def test_a_commit_wakes_a_relay_that_waits(postgresql, url, orders):
    """Its next look by the clock would be in an hour."""
    from reliq.client.client import Clients
    from reliq.relay.mover import OutboxMover
    from reliq.worker.loop import Loop

    mover = OutboxMover(Relay(postgresql.url, poll=3600), Clients(url, ()))
    loop = Loop("relay", mover.step)
    loop.start()
    for count in range(1, 4):
        publish(postgresql, orders)
        eventually(lambda count=count: orders.counts().ready == count, "the row is moved")
    loop.stop()
    mover.poke()
    assert loop.join(30)
    mover.close()


def test_rows_wait_until_they_are_as_durable_as_was_asked(database, orders, mover):
    """There is no replica: what is published is not confirmed, and stays."""
    publish(database, orders, durability=Durability.replicas(1, timeout=0.01))
    publish(database, orders)
    one = mover()

    assert one.move_all() == 1
    assert unsent(database) == 1
    assert orders.counts().totals["published"] == 2

    one._due["overdue"] = 0.0
    one.move_all()
    assert orders.counts().totals["published"] == 2


# ---- as a part of a worker, and cleaning


def test_a_worker_moves_rows_as_one_more_of_its_parts(database, url, orders):
    done = threading.Event()
    consumer = Consumer(url, relay=Relay(database.url, poll=0.05))

    @consumer.handler(orders)
    def ship(body):
        assert body == BODY
        done.set()

    consumer.start()
    publish(database, orders)
    assert done.wait(60)
    consumer.stop()

    assert unsent(database) == 0
    assert not any(thread.name == "reliq-relay" for thread in threading.enumerate())


def test_a_relay_cleans_what_it_has_kept_long_enough_and_says_what_waits(database, url, orders, mover):
    publish(database, orders)
    seen = []
    one = mover(observers=[seen.append], keep=3600, poll=0.01)
    one.step()
    one.step()
    shift(database, "sent_ms", 3_601_000)
    one.step()
    assert all_of(database, "SELECT count(*) FROM reliq_outbox") == [(1,)]

    publish(database, orders)
    shift(database, "made_ms", 5000)
    one._due["clean"] = one._due["look"] = 0.0
    one._look_after()

    assert all_of(database, "SELECT count(*) FROM reliq_outbox") == [(1,)]
    look = [event for event in seen if isinstance(event, events.OutboxSeen)][-1]
    assert look.waiting == 1
    assert 5.0 <= look.oldest_seconds < 60


@pytest.mark.parametrize(
    "options",
    [{"batch": 0}, {"batch": 10_001}, {"keep": -1}, {"poll": 0}, {"prefix": "a b"}, {"url": "http://x"}],
    ids=str,
)
def test_a_setting_that_is_not_allowed_is_refused(options):
    with pytest.raises(ConfigurationError):
        Relay("sqlite:////tmp/x.db", **options)


@pytest.mark.parametrize(
    "url", ["mysql://x", "sqlite://", "sqlite:///:memory:", "shop.db", None, 5, "postgresql://[::"]
)
def test_a_url_that_names_no_database_is_refused_without_its_password(url):
    with pytest.raises(ConfigurationError, match="database URL must be postgresql"):
        Relay(url)


def test_a_relay_takes_an_engine_of_sqlalchemy_by_its_url(tmp_path):
    from sqlalchemy import create_engine

    engine = create_engine("postgresql+psycopg://me:secret@127.0.0.1:1/x")
    assert Relay(engine).database is engine
    with pytest.raises(ConfigurationError) as told:
        Relay("oracle://me:secret@host/x")
    assert "secret" not in str(told.value)


def test_two_relays_that_take_rows_at_once_wait_for_each_other(postgresql, orders):
    """Rows have no marks: who takes some must see the calls of who took some before."""
    from reliq.outbox.database import database as opened

    publish(postgresql, orders)
    one, other = (Store(opened(postgresql.url), "reliq_") for _ in range(2))
    one.begin()
    [row] = one.waiting(5, ())
    one.note_calls({"one.1": [row.seq]})
    found = []
    thread = threading.Thread(target=lambda: (other.begin(), found.append(other.waiting(5, ())), other.commit()))
    thread.start()
    eventually(
        lambda: (
            all_of(postgresql, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted") == [(1,)]
        ),
        "the other waits",
    )
    one.commit()
    thread.join(30)
    one.database.close()
    other.database.close()

    assert found == [[]]


# ---- the commands


def reliq(capsys, monkeypatch, *words):
    """What a command prints, and its exit code."""
    from reliq.cli.app import main

    monkeypatch.setattr("sys.argv", ["reliq", *words])
    with pytest.raises(SystemExit) as done:
        main()
    said = capsys.readouterr()
    return said.out + said.err, done.value.code


def test_the_command_relay_moves_what_is_there_and_sends_again_what_redis_lost(
    database, url, orders, client, capsys, monkeypatch
):
    publish(database, orders)
    relay = ("relay", "--database", database.url, "--url", url, "--once")
    assert reliq(capsys, monkeypatch, *relay) == ("moved 1 row\n", None)
    client.flushall()

    said, _ = reliq(capsys, monkeypatch, *relay, "--again-since", "10m")

    assert said == "1 row is sent again\nmoved 1 row\n"
    assert bodies(orders) == [BODY]


def test_the_command_relay_says_in_one_line_what_is_wrong(tmp_path, url, capsys, monkeypatch):
    empty = tmp_path / "empty.db"
    empty.touch()
    for place, code, text in (
        (f"sqlite:///{empty}", 2, "no table reliq_outbox as reliq makes it"),
        (f"sqlite:///{tmp_path}/none.db", 1, "the database is away: unable to open database file"),
        ("mysql://me:secret@host/x", 2, "a database URL must be postgresql://"),
        ("postgresql://me:secret@127.0.0.1:1/x", 1, "the database is away"),
    ):
        said, exit_code = reliq(capsys, monkeypatch, "relay", "--once", "--url", url, "--database", place)
        assert (exit_code, text in said, "secret" in said, "Traceback" in said) == (code, True, False, False), said


def page(port):
    from urllib.request import urlopen

    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.read()
    except OSError:
        return b""


def test_a_relay_process_ends_in_peace_and_leaves_nothing_over(database, url, orders, tmp_path):
    import signal
    import subprocess
    import sys

    port = str(free_port())
    relay = ["relay", "--database", database.url, "--url", url, "--metrics-port", port]
    publish(database, orders)
    with subprocess.Popen([sys.executable, "-m", "reliq", *relay], stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: orders.counts().ready == 1, "the row is moved")
        eventually(lambda: b"reliq_outbox_rows " in page(port), "the look is served")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert [line for line in process.stderr if " INFO " not in line] == []

    assert unsent(database) == 0
    assert all_of(database, "SELECT count(*) FROM reliq_outbox_calls") == [(0,)]


def test_the_sql_of_the_command_is_what_makes_the_tables(capsys, monkeypatch):
    for dialect in ("postgresql", "sqlite"):
        said, _ = reliq(capsys, monkeypatch, "outbox", "sql", "--dialect", dialect, "--prefix", "shop_")
        from reliq.outbox.tables import ddl

        assert said == "".join(f"{statement};\n" for statement in ddl(dialect, "shop_"))


def test_the_command_clean_deletes_what_was_sent_long_ago(database, orders, mover, capsys, monkeypatch):
    publish(database, orders)
    mover().move_all()
    shift(database, "sent_ms", 3_601_000)

    said, _ = reliq(capsys, monkeypatch, "outbox", "clean", "--database", database.url)
    assert said == "deleted 1 row of the outbox, 0 of the inbox\n"
    said, _ = reliq(capsys, monkeypatch, "outbox", "clean", "--database", database.url, "--json")
    assert said == '{"outbox":0,"inbox":0}\n'


# ---- queues of several shards


def test_rows_of_a_queue_with_shards_go_to_the_shards_of_their_ids(database, orders, mover, client):
    """A relay that knows of no shards is told so by the first one of them, and publishes nothing twice."""
    one = mover()
    publish(database, orders, *[BODY] * 3)
    one.move_all()
    for shard in range(4):
        client.set(orders.keys.of_shard(shard).epoch, "1")
    client.set(orders.keys.map, ShardMap(epoch=1, n=4, was=4).text)
    for number in range(20):
        publish(database, orders, id=f"order-{number}")
    publish(database, orders, *[BODY] * 5)

    assert one.move_all() == 25

    held = [client.llen(keys.ready) for keys in orders.shards()]
    assert sum(held) == 28
    assert min(held) > 0
    publish(database, orders, id="order-7")
    assert mover().move_all() == 1
    assert sum(client.llen(keys.ready) for keys in orders.shards()) == 28


def test_while_shards_are_added_the_old_home_of_a_chosen_id_is_asked(database, orders, mover, client):
    client.set(orders.keys.map, ShardMap(epoch=1, n=4, was=1, state="growing").text)
    moved = next(id for id in (f"order-{number}" for number in range(99)) if home(id, 4) == 3)
    orders.moves.publish([(moved, b',"r":3}\n{}')], CallNumber("p", 1), ttl_ms=60_000, retries=3, window_ms=1000)
    publish(database, orders, id=moved)

    assert mover().move_all() == 1

    assert [client.llen(keys.ready) for keys in orders.shards()] == [1, 0, 0, 0]
