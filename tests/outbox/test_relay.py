"""A relay publishes each committed row once, however it is killed, and however late the next relay starts."""

import json
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.request import urlopen

import pytest
from databases import Postgresql, Sqlite, all_of, bodies, execute, unsent
from ports import free_port
from sqlalchemy import create_engine
from transition import PATIENT_SECONDS, run_transition
from waiting import eventually

from reliq import ConfigurationError, Consumer, Durability, Queue, Relay, events
from reliq.cli.app import main
from reliq.distribution import VERSION
from reliq.errors import RedisUnavailableError
from reliq.keys import QUEUES_KEY, home
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber
from reliq.outbox.store import Store, database as opened
from reliq.outbox.tables import NOW_MS, ddl
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.shards import ShardMap
from reliq.worker.health import Pulse, ready
from reliq.worker.loop import Loop
from tests.postgres import Postgres

BODY = {"order": 42}
#: An id that belongs to the last of four shards.
OF_SHARD_3 = next(id for id in map("order-{}".format, range(99)) if home(id, 4) == 3)


def publish(database, queue, *many, **options):
    """Publish bodies in a separate transaction; return their ids."""
    with closing(database.connect()) as tx:
        ids = [queue.publish_in(tx, body, **options) for body in many or [BODY]]
        tx.commit()
    return ids


def shift(database, column, ms):
    """Set the times of rows or calls back by `ms`."""
    table = {"made_ms": "reliq_outbox", "again_ms": "reliq_outbox_calls", "sent_ms": "reliq_outbox"}[column]
    execute(database, f"UPDATE {table} SET {column} = {column} - {ms}")


@pytest.fixture
def relay(mover):
    return mover()


def test_rows_are_published_in_order_and_kept_for_a_while(database, orders, mover):
    publish(database, orders, *({"n": n} for n in range(7)))

    assert mover(batch=3).move_all() == 7

    assert bodies(orders) == [{"n": n} for n in range(7)]
    assert unsent(database) == 0
    publish(database, orders)
    mover(keep=0).move_all()
    assert all_of(database, "SELECT count(*) FROM reliq_outbox") == [(7,)]
    assert all_of(database, "SELECT count(*) FROM reliq_outbox_calls") == [(0,)]


def test_relay_names_each_of_its_queues_in_the_registry(database, url, orders, relay, client):
    other = Queue("other", url=url)
    publish(database, orders)
    publish(database, other)

    relay.move_all()

    assert set(client.hkeys(QUEUES_KEY)) == {b"orders", b"other"}


def test_row_above_the_bytes_of_a_call_is_published_alone(database, orders, mover, monkeypatch):
    monkeypatch.setattr("reliq.outbox.store.READ_BYTES", 100)
    publish(database, orders, {"n": 1}, {"n": "x" * 200}, {"n": 3})

    assert mover().move_all() == 3
    assert [len(str(body["n"])) for body in bodies(orders)] == [1, 200, 1]


def test_call_of_a_relay_is_remembered_for_weeks_by_its_script_and_no_id_is(database, orders, relay, client):
    """A relay may be killed right after its call; the call's number then proves that the row was published."""
    publish(database, orders)
    relay._take()
    client.script_flush()
    for _ in range(2):
        [sending] = relay.redis.calls
        assert relay.redis.clients.blocking().run(sending.request()).refused == {}
        assert client.pttl(orders.keys.lane(sending.number.lane)) > 29 * 86_400_000
    assert bodies(orders) == [BODY]
    names = {key.decode().partition("}:")[2].partition(":")[0] for key in client.scan_iter("{reliq:orders}*")}
    assert {"dd", "windows", "msg"} & names == set()


def test_row_committed_late_with_a_lower_number_is_moved(postgresql, orders, mover_at):
    mover = mover_at(postgresql.url)
    with closing(postgresql.connect()) as late, closing(postgresql.connect()) as early:
        orders.publish_in(late, {"which": "late"})
        orders.publish_in(early, {"which": "early"})
        early.commit()
        assert mover.move_all() == 1
        late.commit()
        assert mover.move_all() == 1

    assert bodies(orders) == [{"which": "early"}, {"which": "late"}]


def test_delay_counts_from_the_insert_of_the_row_also_while_redis_is_away(database, orders, relay, client):
    publish(database, orders, delay=1000)
    shift(database, "made_ms", 300_000)
    relay._take()
    relay.redis.calls[0].taken_at -= 400

    relay.redis.publish()

    [(_, due)] = client.zrange(orders.keys.pending, 0, 0, withscores=True)
    assert 0.0 < due - client.time()[0] <= 301.01


def test_rows_with_similar_delays_share_a_call(database, orders, relay):
    publish(database, orders, *[BODY] * 50, delay=3600)
    relay._take()

    assert 1 <= len(relay.redis.calls) <= 3


def test_late_relay_publishes_nothing_twice_after_the_dedup_window(database, url, mover, client):
    """Without the call's number the message would be published again: its id is free by then."""
    queue = Queue("orders", dict, url=url, dedup=0.001)
    publish(database, queue)
    publish(database, queue, id="chosen")
    killed = mover()
    killed.move()
    killed.redis.calls.clear()  # Redis has its messages, but the database does not record it
    killed.store.database.close()
    assert (unsent(database), len(bodies(queue))) == (2, 2)
    eventually(lambda: not list(client.scan_iter("*:dd:*")), "the window is over")
    shift(database, "again_ms", 7 * 86_400_000)

    mover().move_all()

    assert (unsent(database), queue.counts().totals["published"]) == (0, 2)


def test_stalled_relay_publishes_nothing_twice_after_a_takeover(database, orders, mover):
    publish(database, orders)
    stalled, other = mover(), mover()
    stalled._take()
    assert other.move() == 0  # the first relay may still return
    shift(database, "again_ms", 60_000)
    other._due["overdue"] = 0.0
    assert other.move() == 1
    assert bodies(orders) == [BODY]

    assert stalled.move_all() == 1

    assert orders.counts().totals["published"] == 1
    publish(database, orders, {"order": 43})
    stalled.move_all()
    assert bodies(orders) == [{"order": 43}]


def test_call_repeated_after_a_later_call_of_its_lane_is_done(database, orders, mover):
    publish(database, orders)
    owner, late = mover(), mover()
    owner._take()
    late._take(every=True)  # it holds the same call
    owner.move_all()
    publish(database, orders, {"order": 43})
    owner.move_all()

    assert late.move_all() == 1

    assert orders.counts().totals["published"] == 2


def test_two_relays_move_each_row_once(database, orders, mover):
    publish(database, orders, *({"n": n} for n in range(300)))
    movers = [mover(batch=7), mover(batch=11)]

    with ThreadPoolExecutor() as pool:
        for one in movers:
            pool.submit(one.move_all)

    movers[0].move_all()
    assert sorted(body["n"] for body in bodies(orders)) == list(range(300))


def test_rows_that_redis_lost_are_sent_again_and_not_those_that_it_kept(database, orders, relay, client):
    """A second entry in a list would deliver a living message twice."""
    publish(database, orders, {"n": 1})
    relay.move_all()
    shift(database, "sent_ms", 3_600_000)
    publish(database, orders, {"n": 2}, {"n": 3})
    relay.move_all()

    assert (relay.store.again(600_000), relay.move_all()) == (2, 2)
    assert orders.counts().totals["published"] == 3

    client.flushall()
    assert (relay.store.again(600_000), relay.move_all()) == (2, 2)
    assert bodies(orders) == [{"n": 2}, {"n": 3}]


# ---- failures


def test_rows_that_redis_refuses_stay_and_do_not_block_others(database, url, orders, mover, client):
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


@pytest.mark.parametrize("by", ["another relay", "a DELETE"])
def test_queue_is_taken_again_when_its_refused_call_is_settled_elsewhere(database, orders, mover, relay, client, by):
    client.set(orders.keys.ready, "no list")
    publish(database, orders, {"n": 1})
    assert relay.move() == 0
    relay._take()  # records its failure
    publish(database, orders, {"n": 2})
    assert relay.move() == 0

    client.delete(orders.keys.ready)
    if by == "a DELETE":
        execute(database, "DELETE FROM reliq_outbox WHERE seq IN (SELECT min(seq) FROM reliq_outbox)")
    mover().move_all()
    publish(database, orders, {"n": 3})

    assert relay.move() == 1
    assert [body["n"] for body in bodies(orders)] == [1, 2, 3][by == "a DELETE" :]


def publish_delayed(database, queue, count):
    """Publish rows that need a call each, because their delays differ too much."""
    with closing(database.connect()) as tx:
        for number in range(count):
            queue.publish_in(tx, BODY, delay=3600 + 2 * number)
        tx.commit()


def test_failed_calls_of_a_queue_are_all_made_again_after_its_first_success(database, orders, relay, client):
    client.set(orders.keys.pending, "no sorted set")
    publish_delayed(database, orders, 45)
    assert (relay.move(), len(relay.redis.of_outcome("failed"))) == (0, 45)
    relay._take()  # records the failures
    shift(database, "again_ms", 5000)
    relay._due["overdue"] = 0.0
    assert [relay.move() or len(relay.redis.of_outcome("failed")) for _ in range(3)] == [20, 20, 5]
    relay._take()

    client.delete(orders.keys.pending)
    publish(database, orders)
    execute(
        database,
        "UPDATE reliq_outbox_calls SET again_ms = 0 WHERE call_number IN (SELECT min(call_number) FROM reliq_outbox_calls)",
    )
    relay._due["overdue"] = 0.0

    assert [relay.move() for _ in range(5)] == [1, 21, 20, 4, 0]


def test_run_that_moves_all_rows_tries_every_earlier_call_once(database, url, orders, mover, client):
    spoilt = Queue("spoilt", dict, url=url)
    client.set(spoilt.keys.pending, "no sorted set")
    publish_delayed(database, spoilt, 25)
    dead, other = mover(), mover()
    dead._take()
    publish(database, orders)
    dead._take()
    dead.store.database.close()

    assert other.move_all() == 1

    assert unsent(database) == 25
    assert all_of(database, "SELECT min(failures), max(failures) FROM reliq_outbox_calls") == [(1, 1)]


def test_refused_call_backs_off_longer_each_time_on_every_relay(database, orders, mover, client):
    client.set(orders.keys.ready, "no list")
    publish(database, orders)
    for wait in (5000, 10_000, 20_000):
        one = mover()
        one.move()
        before = milliseconds(database, NOW_MS[database.dialect])
        one._take()
        again = milliseconds(database, "again_ms", "FROM reliq_outbox_calls")
        assert before <= again - wait <= milliseconds(database, NOW_MS[database.dialect])
        other = mover()
        assert (other.move(), other.redis.of_outcome("failed")) == (0, [])
        shift(database, "again_ms", 100_000)


def milliseconds(database, what, where=""):
    [(found,)] = all_of(database, f"SELECT {what} {where}")
    return found


def test_impossible_row_is_refused_once_with_its_reason(database, orders, mover, caplog):
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
    assert [note.startswith(f"refused by reliq {VERSION}: ") for note in notes] == [True, True, True, False]
    assert len([one for one in caplog.records if "cannot be published and stays" in one.message]) == 3


@pytest.mark.parametrize("note", ["", "again"], ids=["first", "again"])
def test_row_refused_by_version_is_taken_by_a_newer_relay_alone(database, orders, mover, monkeypatch, note):
    monkeypatch.setattr("reliq.outbox.relay.VERSION", "0.9.0")
    publish(database, orders)
    execute(database, f'UPDATE reliq_outbox SET terms = \'{{"ttl_ms":5000,"retries":1,"later":1}}\', note = \'{note}\'')
    assert mover().move_all() == 0
    execute(database, 'UPDATE reliq_outbox SET terms = \'{"ttl_ms":5000,"retries":1}\'')

    assert mover().move_all() == 0
    monkeypatch.setattr("reliq.outbox.relay.VERSION", "0.8.9")
    assert mover().move_all() == 0
    monkeypatch.setattr("reliq.outbox.relay.VERSION", "0.10.0")
    newer = mover()
    newer._take()
    assert [one.again for one in newer.redis.calls] == [note == "again"]
    assert newer.redis.publish() == 1


def test_unreachable_redis_keeps_no_transaction_open_and_loses_nothing(database, orders, relay, client):
    publish(database, orders)
    client.config_set("maxclients", 1)
    try:
        relay.redis.clients.connection().close()
        with pytest.raises(RedisUnavailableError):
            relay.move()
    finally:
        client.config_set("maxclients", 10_000)
    execute(database, "INSERT INTO orders VALUES ('a')")

    assert relay.move_all() == 1
    assert bodies(orders) == [BODY]


def test_unreachable_database_is_logged_once_and_tried_until_it_returns(tmp_path, orders, mover_at, caplog):
    seen = []
    mover = mover_at(f"sqlite:///{tmp_path}/late.db", [seen.append], poll=0.01)
    caplog.set_level("INFO")

    assert mover.step() > 0
    assert mover.step() > 0
    publish(Sqlite(tmp_path / "late.db"), orders)
    assert mover.step() == 0.0

    assert bodies(orders) == [BODY]
    kinds = [type(one) for one in seen]
    assert kinds.count(events.DatabaseUnavailable) == 2
    assert kinds.count(events.DatabaseRecovered) == 1
    said = [one.message for one in caplog.records if one.name.startswith("reliq.outbox.relay")]
    assert ["retrying" in line for line in said] == [True, False]


def test_relay_goes_on_after_any_database_error_and_reports_it(database, orders, mover):
    """Errors such as a missing table or a read-only database are no lost connections."""
    seen = []
    one = mover(observers=[seen.append], poll=0.01)
    assert one.step() == 0.0
    publish(database, orders)
    execute(database, "ALTER TABLE reliq_outbox RENAME TO away")
    one._well_at -= 31
    one._looked_at -= 31
    assert one.step() > 0
    assert re.match(r"the relay has not completed a round for 3\d s: ", one.complaint())
    execute(database, "ALTER TABLE away RENAME TO reliq_outbox")

    assert one.step() == 0.0
    assert (one.complaint(), bodies(orders)) == ("", [BODY])
    looks = [event.oldest_seconds >= 31 for event in seen if isinstance(event, events.OutboxSeen)]
    assert looks == [False, True, False]


def test_outbox_figures_are_read_while_redis_is_unreachable(database, orders, mover):
    seen = []
    publish(database, orders)

    with pytest.raises(RedisUnavailableError):
        mover([seen.append], redis="redis://127.0.0.1:1/0").step()

    assert [event.waiting for event in seen if isinstance(event, events.OutboxSeen)] == [1]


@pytest.mark.slow
def test_restart_of_postgresql_loses_nothing(postgres, orders, mover_at):
    with Postgres() as server:
        database = Postgresql(server)
        mover = mover_at(server.url, poll=0.01)
        publish(database, orders)
        assert mover.step() == 0.0
        server.stop(2)
        assert mover.step() > 0
        server.start()
        eventually(lambda: mover.step() == 0.0, "the relay has its database back")
        publish(database, orders)
        eventually(lambda: mover.step() == 0.0 and orders.counts().ready == 2, "the second is moved")


def test_commit_wakes_a_waiting_relay(postgresql, orders, mover_at):
    """Its next poll would be in an hour."""
    mover = mover_at(postgresql.url, poll=3600)
    loop = Loop("relay", mover.step)
    loop.start()
    for count in range(1, 4):
        publish(postgresql, orders)
        eventually(lambda count=count: orders.counts().ready == count, "the row is moved")
    loop.stop()
    mover.poke()
    assert loop.join(30)


def test_rows_stay_until_their_durability_is_confirmed(database, orders, relay):
    """Without a replica, the publish is not confirmed and the row stays in the outbox."""
    publish(database, orders, durability=Durability.replicas(1, timeout=0.01))
    publish(database, orders)

    assert relay.move_all() == 1
    assert unsent(database) == 1
    assert orders.counts().totals["published"] == 2

    relay._due["overdue"] = 0.0
    relay.move_all()
    assert orders.counts().totals["published"] == 2


def test_queue_that_is_not_confirmed_is_waited_for_once_and_backs_off(database, url, orders, relay, client):
    slow = Queue("slow", dict, url=url)
    for ttl in (60, 61, 62):  # three calls
        publish(database, slow, ttl=ttl, durability=Durability.replicas(1, timeout=0.01))
    client.config_resetstat()
    for _ in range(3):
        publish(database, orders)
        publish(database, slow, durability=Durability.replicas(1, timeout=0.01))
        assert relay.move() == 1

    assert client.info("commandstats")["cmdstat_wait"]["calls"] == 1
    assert unsent(database) == 6 + 1  # the next round records the last row of `orders`


# ---- as a part of a worker, and cleanup


def test_worker_moves_rows_and_says_why_it_is_not_ready_when_its_relay_is_stuck(database, url, orders, monkeypatch):
    monkeypatch.setattr("reliq.outbox.relay.STUCK_SECONDS", 1.0)
    consumer, pulse, seen = Consumer(url, relay=Relay(database.url, poll=0.05)), Pulse(), []
    consumer.handler(orders)(seen.append)
    consumer.start()
    publish(database, orders)
    eventually(lambda: unsent(database) == 0 and seen == [BODY], "the row is moved and handled")

    def unready():
        pulse.note(consumer.stats())
        return ready([pulse], lambda: True)

    execute(database, "ALTER TABLE reliq_outbox RENAME TO away")
    eventually(lambda: "the relay has not completed a round for" in unready(), "it is not ready")
    assert "reliq_outbox" in unready()
    execute(database, "ALTER TABLE away RENAME TO reliq_outbox")
    eventually(lambda: not unready(), "it is ready again")
    consumer.stop()
    assert not any(thread.name == "reliq-relay" for thread in threading.enumerate())


def test_relay_deletes_old_rows_and_reports_waiting_rows(database, orders, mover):
    seen = []
    one = mover(observers=[seen.append], keep=3600)
    publish(database, orders)
    one.move_all()
    shift(database, "sent_ms", 3_601_000)
    publish(database, orders)
    shift(database, "made_ms", 5000)

    one._look_after()

    assert all_of(database, "SELECT count(*), count(sent_ms) FROM reliq_outbox") == [(1, 0)]
    look = [event for event in seen if isinstance(event, events.OutboxSeen)][-1]
    assert look.waiting == 1
    assert 5.0 <= look.oldest_seconds < 600


def test_bad_setting_or_database_of_a_relay_is_refused():
    for options in ({"batch": 0}, {"keep": -1}, {"poll": 0}, {"prefix": "a b"}, {"url": "http://x"}):
        with pytest.raises(ConfigurationError, match=f"(?i){next(iter(options))} must"):
            Relay("sqlite:////tmp/x.db", **options)
    for url in ("mysql://me:secret@x", "sqlite://", "sqlite:///:memory:", "shop.db", None, 5, "postgresql://[::"):
        with pytest.raises(ConfigurationError, match="database URL must be postgresql") as told:
            Relay(url)
        assert "secret" not in str(told.value)
    engine = create_engine("postgresql+psycopg://me:secret@127.0.0.1:1/x")
    assert Relay(engine).database is engine


def test_two_relays_that_take_rows_at_once_wait_for_each_other(postgresql, orders):
    """A relay must see the calls of the relay before it, with any default isolation level of the database."""
    publish(postgresql, orders)
    url = f"{postgresql.url}?options=-c%20default_transaction_isolation%3Drepeatable%5C%20read"
    one, other = (Store(opened(url), "reliq_") for _ in range(2))
    one.begin()
    [row] = one.waiting(5)
    one.note_call("one.1", row.queue, [row.seq])
    found = []
    thread = threading.Thread(target=lambda: (other.begin(), found.append(other.waiting(5)), other.database.commit()))
    thread.start()
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    eventually(lambda: all_of(postgresql, waiting) == [(1,)], "the other waits")
    one.database.commit()
    thread.join(30)
    one.database.close()
    other.database.close()

    assert found == [[]]


def test_relay_goes_on_while_another_is_frozen_in_its_transaction(postgresql, orders, mover_at, monkeypatch):
    monkeypatch.setattr("reliq.outbox.store.STUCK_SECONDS", 3)
    publish(postgresql, orders)
    frozen, other = (mover_at(postgresql.url, poll=0.01) for _ in range(2))
    frozen.store.begin()
    frozen.store.waiting(5)

    eventually(lambda: other.step() == 0.0, "the other relay moves the row")
    assert bodies(orders) == [BODY]
    assert frozen.step() > 0
    eventually(lambda: frozen.step() == 0.0, "the frozen relay goes on")


# ---- the commands


@pytest.fixture
def reliq(monkeypatch, capsys, url):
    """Run a command on a database; return its output and its exit code."""
    monkeypatch.setenv("RELIQ_URL", url)

    def run(database, *words):
        place = ("--database", getattr(database, "url", database)) if database else ()
        monkeypatch.setattr("sys.argv", ["reliq", *words, *place])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        return said.out + said.err, done.value.code or 0

    return run


def test_command_relay_moves_rows_and_sends_lost_rows_again(database, orders, client, reliq):
    publish(database, orders)
    assert reliq(database, "relay", "--once") == ("moved 1 row\n", 0)
    client.flushall()

    assert reliq(database, "relay", "--once", "--resend-since", "10m") == ("1 row is sent again\nmoved 1 row\n", 0)
    assert bodies(orders) == [BODY]


def test_command_outbox_lists_and_retries_refused_rows(database, orders, reliq):
    [id] = publish(database, orders)
    execute(database, "UPDATE reliq_outbox SET queue = 'no queue'")
    said, code = reliq(database, "relay", "--once")
    assert (code, "moved 0 rows" in said, "1 row remains" in said) == (3, True, True), said

    said, _ = reliq(database, "outbox", "retry")
    assert (id in said, f"refused by reliq {VERSION}: 'no queue' is not a queue name" in said) == (True, True), said
    assert json.loads(reliq(database, "outbox", "retry", "--json")[0])[0]["id"] == id
    execute(database, "UPDATE reliq_outbox SET queue = 'orders'")
    assert "1 row is tried again" in reliq(database, "outbox", "retry", "--all")[0]
    assert reliq(database, "relay", "--once") == ("moved 1 row\n", 0)
    assert reliq(database, "outbox", "retry") == ("no row is refused\n", 0)
    assert reliq(database, "outbox", "retry", "--all", "--json") == ('{"retried":0}\n', 0)


def test_command_relay_reports_errors_in_one_line(tmp_path, reliq):
    empty = tmp_path / "empty.db"
    empty.touch()
    for place, code, text in (
        (f"sqlite:///{empty}", 2, "no table reliq_outbox with reliq's columns"),
        (f"sqlite:///{tmp_path}/none.db", 1, "the database failed: unable to open database file"),
        ("mysql://me:secret@host/x", 2, "a database URL must be postgresql://"),
        ("postgresql://me:secret@127.0.0.1:1/x", 1, "the database failed"),
    ):
        said, exit_code = reliq(place, "relay", "--once")
        assert (exit_code, text in said, "secret" in said, "Traceback" in said) == (code, True, False, False), said


def page(port):
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.read()
    except OSError:
        return b""


@pytest.mark.slow
def test_relay_process_stops_by_sigterm_and_leaves_nothing(database, url, orders, tmp_path):
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


def test_command_outbox_sql_prints_the_tables(reliq):
    said, _ = reliq(None, "outbox", "sql", "--dialect", "sqlite", "--prefix", "shop_")
    assert said == "".join(f"{statement};\n" for statement in ddl("sqlite", "shop_"))


def test_command_outbox_clean_deletes_old_rows_in_pieces(database, orders, relay, reliq, monkeypatch):
    monkeypatch.setattr("reliq.outbox.store.DELETE_LIMIT", 2)
    publish(database, orders, *[BODY] * 5)
    relay.move_all()
    shift(database, "sent_ms", 3_601_000)

    assert reliq(database, "outbox", "clean") == ("deleted 5 rows of the outbox, 0 of the inbox\n", 0)
    assert reliq(database, "outbox", "clean", "--json") == ('{"outbox":0,"inbox":0}\n', 0)


# ---- queues of several shards


def lengths(client, queue):
    """Return the number of waiting messages in each of four shards."""
    return [client.llen(queue.keys.of_shard(number).ready) for number in range(4)]


def test_rows_of_a_sharded_queue_go_to_the_shards_of_their_ids(database, orders, mover, relay, client):
    """A relay without a shard map learns of the shards from the first shard's reply, and publishes no row twice."""
    publish(database, orders, *[BODY] * 3)
    relay.move_all()
    for shard in range(4):
        client.set(orders.keys.of_shard(shard).epoch, "1 4 4")
    client.set(orders.keys.map, ShardMap(epoch=1, n=4, was=4).text)
    for number in range(20):
        publish(database, orders, id=f"order-{number}")
    publish(database, orders, *[BODY] * 5)

    assert relay.move_all() == 25

    assert (sum(lengths(client, orders)), min(lengths(client, orders)) > 0) == (28, True)
    publish(database, orders, id="order-7")
    assert mover().move_all() == 1
    assert sum(lengths(client, orders)) == 28


def test_rows_go_to_the_shards_of_their_ids_from_the_first_row_of_their_queue(database, url, orders, relay, client):
    """Each queue has a map, which the relay reads before it sends the first row: the ids determine the shards."""
    client.set(orders.keys.map, ShardMap(epoch=1, n=4, was=4).text)
    publish(database, Queue("other", url=url))
    relay.move_all()
    publish(database, Queue("orders", dict, url=url, shards=4), *[BODY] * 8)

    assert relay.move_all() == 8

    assert lengths(client, orders) == [2] * 4


def test_unreadable_map_of_a_queue_holds_up_no_other_queue(database, url, orders, relay, client, caplog):
    spoilt = Queue("spoilt", dict, url=url)
    client.set(spoilt.keys.map, "no map")
    publish(database, spoilt, *[BODY] * 2)
    publish(database, orders)

    assert relay.move_all() == 1
    assert relay.move() == 0
    assert unsent(database) == 2
    assert "could not publish 2 rows of queue spoilt; retrying" in caplog.text

    client.delete(spoilt.keys.map)
    assert relay.move_all() == 2


def test_chosen_id_is_looked_up_in_its_old_home_while_shards_are_added(database, orders, mover, client):
    client.set(orders.keys.map, ShardMap(epoch=1, n=4, was=1, state="growing").text)
    run_transition(
        orders, "publish", [(OF_SHARD_3, b',"r":3}\n{}')], CallNumber("p", 1), ttl_ms=60_000, retries=3, window_ms=1000
    )
    publish(database, orders, id=OF_SHARD_3)

    assert mover().move_all() == 1

    assert lengths(client, orders) == [1, 0, 0, 0]


def test_rows_are_taken_anew_when_the_old_home_knows_a_later_map(database, orders, relay, client):
    """The relay read the map while shards were added; by now the resize is complete."""
    publish(database, orders, id=OF_SHARD_3)
    client.set(orders.keys.map, ShardMap(1, 4, 1, "growing").text)
    run_blocking(relay.redis.shards(orders.name).read(BLOCKING))
    client.set(orders.keys.map, ShardMap(2, 4, 4).text)
    client.set(orders.keys.epoch, "2 4 4")  # the new home has the old epoch still

    assert [relay.move() for _ in range(3)] == [0, 1, 0]

    assert lengths(client, orders) == [0, 0, 0, 1]
    assert unsent(database) == 0


@pytest.mark.parametrize(
    ("before", "after", "fences", "published", "shard"),
    [
        (ShardMap(1, 4, 4), ShardMap(3, 1, 1), ["3 1 1", "3 1 1 closed", "2 2 2 closed", "2 2 2 closed"], None, 0),
        (ShardMap(), ShardMap(1, 4, 4), ["1 4 4"] * 4, 3, 3),
        (ShardMap(1, 4, 1, "growing"), ShardMap(1, 4, 1, "growing"), ["1 4 1"] * 4, 0, 0),
        (ShardMap(1, 4, 4), None, [], None, 0),
    ],
    ids=["fewer", "more", "growing", "forgotten"],
)
def test_earlier_call_for_a_shard_that_is_not_the_home_publishes_nothing(
    database, orders, mover, client, before, after, fences, published, shard
):
    """
    A relay recorded the call by an old map and died, perhaps before it asked the old home of a chosen id.

    Forgotten: an operator forgot the queue, or Redis lost the data of the shard.
    """
    publish(database, orders, id=OF_SHARD_3)
    client.set(orders.keys.map, before.text)
    dead = mover()
    run_blocking(dead.redis.shards(orders.name).read(BLOCKING))
    dead._take()
    dead.store.database.close()
    client.delete(orders.keys.map)
    orders.connection().maps.clear()
    if after:
        client.set(orders.keys.map, after.text)
    for number, fence in enumerate(fences):
        client.set(orders.keys.of_shard(number).epoch, fence)
    if published is not None:
        keys, options = orders.keys.of_shard(published), {"ttl_ms": 60_000, "retries": 3, "window_ms": 1000}
        call = transitions.publish(
            keys, [(OF_SHARD_3, b',"r":3}\n{}')], CallNumber("p", 1), fence=after.fence, **options
        )
        orders._clients.blocking(PATIENT_SECONDS).run(call)

    other = mover()
    run_blocking(other.redis.shards(orders.name).read(BLOCKING))
    other.move_all()

    assert lengths(client, orders) == [n == shard for n in range(4)]
    assert [client.get(orders.keys.of_shard(number).epoch).decode() for number in range(len(fences))] == fences
    assert unsent(database) == 0


def test_stopped_relay_publishes_nothing_that_another_relay_moved(database, orders, mover, client):
    """The queue grew while the relay paused between its commit and its call; another relay has published the rows."""
    wide = Queue("orders", dict, url=orders.target, shards=4)
    publish(database, wide, *[BODY] * 4)
    stopped, other = mover(), mover()
    run_blocking(stopped.redis.shards(orders.name).read(BLOCKING))
    stopped._take()
    client.set(orders.keys.map, ShardMap(1, 4, 1, "growing").text)
    for number in range(4):
        client.set(orders.keys.of_shard(number).epoch, "1 4 1")

    run_blocking(other.redis.shards(orders.name).read(BLOCKING))
    other.move_all()
    stopped.redis.publish()

    assert lengths(client, orders) == [1, 1, 1, 1]
