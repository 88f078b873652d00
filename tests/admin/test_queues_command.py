"""`reliq queues`, `workers`, `running`, `account`: what a person on call asks first."""

import re
import threading
import time

import pytest
from waiting import eventually

from reliq import Consumer, Queue, WorkerSettings, commands
from reliq.admin import Admin
from reliq.cli.work import _print_handlers
from reliq.errors import ConfigurationError
from reliq.keys import QUEUES_KEY, Keys, Layout
from reliq.roster import Slot, Worker

PATIENCE_SECONDS = 30.0


@pytest.fixture
def admin(url):
    return Admin(url)


@pytest.fixture
def alive(client):
    """Write the record of a worker, as its process would."""

    def make(id="w1", queues=("q",), running=(), **fields):
        now = time.time()
        told = {
            "host": "db1",
            "pid": 7,
            "version": "1.2.3",
            "slots": 4,
            "started": now - 60,
            "last_claim": now,
            "seen": now,
        }
        worker = Worker(id=id, queues=queues, busy=len(running), running=running, **(told | fields))
        for command in commands.write_worker(worker):
            client.execute_command(*command.command)
        return worker

    return make


@pytest.fixture
def busy(url, queue):
    """A worker of this process in whose handler a message stays until the test ends."""
    inside, over = threading.Event(), threading.Event()
    consumer = Consumer(url)

    @consumer.handler(queue)
    def stay(body):
        inside.set()
        assert over.wait(PATIENCE_SECONDS)

    queue.publish({"n": 1}, id="stays")
    consumer.start(WorkerSettings(concurrency=2))
    assert inside.wait(PATIENCE_SECONDS)
    yield consumer.engine()._heartbeat
    over.set()
    consumer.stop()


def view_of(command, name, *words):
    return {view["queue"]: view for view in command("queues", "--json", *words).json["queues"]}[name]


# ---- queues -----------------------------------------------------------------


def test_queues_has_every_state_and_how_late_the_first_message_is(command, queue, client, die):
    for number in range(3):
        queue.publish({"n": number}, id=f"failing-{number}")
    with queue.receive(limit=3) as jobs:
        for job in jobs:
            job.nack(delay=3600)
    queue.publish({}, delay=3600)
    die("dead")
    queue.publish({})
    client.set(queue.keys.msg("old"), b'RELIQ/1 {"d":1000,"r":3}\n{}')
    client.rpush(queue.keys.ready, "old")

    view = view_of(command, "q", "--interval", "0")

    states = {name: view[name] for name in ("pending", "ready", "unack", "backoff", "retry", "garbage", "dead")}
    assert states == {"pending": 1, "ready": 2, "unack": 3, "backoff": 3, "retry": 0, "garbage": 0, "dead": 1}
    assert view["late"] > 1_700_000_000 - 1000
    assert view["rates"] is None


def test_queues_finds_one_that_has_only_producers(command, queue):
    queue.publish({})

    done = command("queues", "--interval", "0")

    assert done.code == 0
    assert done.out.split("\n")[1].split()[0] == "q"


def test_rates_are_what_moved_between_two_looks(admin, queue):
    queue.publish_many({"n": number} for number in range(9))
    watcher = admin.watch()
    assert watcher.look().overview.queues[0].rates is None
    queue.publish_many({"n": number} for number in range(5))
    with queue.receive(limit=3) as jobs:
        jobs[0].nack(delay=60)
        jobs[1].reject()

    rates = watcher.look().overview.queues[0].rates

    moved = [getattr(rates, name) * rates.over_seconds for name in ("arrived", "acked", "failed", "ended")]
    assert [round(number) for number in moved] == [5, 1, 2, 0]


def test_queues_counts_twice_for_the_rates(command, queue):
    queue.publish({})

    rates = view_of(command, "q", "--interval", "100ms")["rates"]

    assert rates["over_seconds"] >= 0.1
    assert (rates["arrived"], rates["acked"], rates["failed"], rates["ended"]) == (0, 0, 0, 0)


def test_queues_says_who_paused_a_queue_why_and_for_how_long(command, queue):
    queue.publish({})
    queue.pause(reason="gateway down", for_=1800)

    out = command("queues", "--interval", "0").out

    assert re.search(r"^q is paused by \S+@\S+ \S+ ago, for (30m|29m\d+s) more: gateway down$", out, re.MULTILINE)
    assert view_of(command, "q", "--interval", "0")["pause"]["reason"] == "gateway down"


def test_a_pause_that_something_else_wrote_is_its_reason(command, queue, client):
    queue.publish({})
    client.set(queue.keys.paused, "by hand", px=7_200_000)

    out = command("queues", "--interval", "0").out

    assert re.search(r"^q is paused, for (2h|1h59m) more: by hand$", out, re.MULTILINE)


def test_queues_counts_the_workers_of_each_queue_and_their_slots(command, queue, alive):
    queue.publish({})
    alive("w1", queues=("q", "other"), running=(Slot("q", "m", 1, time.time()),))
    alive("w2", queues=("q",), slots=3)
    alive("w3", queues=("other",))

    view = view_of(command, "q", "--interval", "0")

    assert (view["workers"], view["slots"], view["busy"]) == (2, 7, 1)


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        (Layout.hdt3213(), "hdt3213"),
        (Layout.hdt3213(hash_tag=True), "hdt3213:tag"),
        (Layout.hdt3213(prefix="shop:dp"), "hdt3213:prefix=shop:dp"),
    ],
)
def test_a_scan_finds_queues_of_the_go_original(command, url, client, layout, shown):
    Queue("go", bytes, url=url, layout=layout).publish(b"x")
    client.delete(QUEUES_KEY)

    assert command("queues", "--interval", "0", "--json").json["queues"] == []
    view = view_of(command, "go", "--scan", "--interval", "0")

    assert (view["layout"], view["ready"]) == (shown, 1)


def test_a_scan_finds_one_that_the_registry_lost_and_none_twice(command, queue, client):
    queue.publish({})
    assert len(command("queues", "--scan", "--interval", "0", "--json").json["queues"]) == 1
    client.delete(QUEUES_KEY)

    assert view_of(command, "q", "--scan", "--interval", "0")["layout"] == "reliq"


def test_a_scan_goes_in_short_steps_and_passes_over_what_is_no_queue(command, queue, client, monkeypatch):
    monkeypatch.setattr("reliq.admin.discover.STEP_KEYS", 10)
    queue.publish_many({"n": number} for number in range(100))
    client.hset("not a queue:retry:cnt", "a", "1")
    client.hset("{reliq:not so either!}:retry:cnt", "a", "1")

    done = command("queues", "--scan", "--interval", "0", "--json")

    assert [view["queue"] for view in done.json["queues"]] == ["q"]
    assert client.info("commandstats")["cmdstat_scan"]["calls"] > 5


def test_a_queue_with_a_spoilt_key_hides_no_other(command, queue, client):
    queue.publish({})
    client.hset(QUEUES_KEY, "spoilt", "1")
    client.set(Keys("spoilt").ready, "not a list")
    client.hset(QUEUES_KEY, "no name!", "1")

    done = command("queues", "--interval", "0")

    assert "spoilt cannot be read" in done.out
    assert command("queues", "--json", "--interval", "0").json["unreadable"].keys() == {"spoilt"}
    assert view_of(command, "q", "--interval", "0")["ready"] == 1


def test_queues_without_any_says_where_else_to_look(command, url):
    done = command("queues", "--interval", "0")

    assert (done.code, done.err) == (0, "")
    assert "--scan" in done.out


# ---- workers, running -------------------------------------------------------


def test_workers_says_who_is_alive(command, alive):
    alive("w1", queues=("orders", "mails"))

    done = command("workers")

    assert done.out.split("\n")[1].split()[:5] == ["w1", "db1", "7", "1.2.3", "0/4"]
    assert done.out.splitlines()[1].endswith("orders mails")
    (told,) = command("workers", "--json").json
    assert (told["host"], told["slots"], told["queues"]) == ("db1", 4, ["orders", "mails"])


def test_a_worker_whose_record_has_expired_is_not_alive(command, alive, client):
    alive("w1")
    client.delete("reliq:worker:w1")

    assert command("workers").out == "No worker is alive.\n"
    assert command("workers", "--json").json == []


def test_running_says_which_message_runs_where_since_when(command, alive, queue):
    queue.publish({})
    now = time.time()
    rows = (Slot("q", "slow", 2, now - 900), Slot("q", "quick", 1, now), Slot("other", "elsewhere", 1, now))
    alive("w1", queues=("q", "other"), running=rows)

    assert [row["id"] for row in command("running", "q", "--json").json] == ["slow", "quick"]
    (row,) = command("running", "q", "--longer-than", "10m", "--json").json
    assert (row["id"], row["attempt"], row["worker"], row["pid"]) == ("slow", 2, "w1", 7)
    assert 900 <= row["seconds"] < 960
    assert "15m" in command("running", "q").out


def test_records_older_than_a_second_say_how_old_they_are(command, alive, queue):
    queue.publish({})
    rows = (Slot("q", "m", 1, time.time() - 90),)
    alive("w1", running=rows, seen=time.time() + 60)  # a clock that is ahead
    assert "as of" not in command("running", "q").out + command("workers").out

    alive("w2", running=rows, seen=time.time() - 4)

    for words in (["running", "q"], ["workers"]):
        assert re.fullmatch(r"as of \d+(\.\d)?s ago", command(*words).out.splitlines()[-1])
        assert all(one["seen"] < time.time() + 61 for one in command(*words, "--json").json)


def test_running_tells_what_a_real_worker_runs(command, busy, queue):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (rows := command("running", "q", "--json").json):
        assert time.monotonic() < deadline
        busy._beat_at = 0.0  # the next of its own comes in 5 s
        busy.step()

    (row,) = rows
    assert (row["queue"], row["id"], row["attempt"]) == ("q", "stays", 1)
    assert row["seconds"] >= 0


def test_running_tells_where_each_handler_stands(command, busy, queue, monkeypatch):
    monkeypatch.setattr("reliq.worker.heartbeat.BEAT_SECONDS", 0.05)
    busy._beat_at = 0.0
    busy.wake()
    eventually(lambda: command("running", "q", "--json").json, "its record says that it runs")

    told = command("running", "q", "--stacks").out

    assert re.search(r"^stays in .*:\d+\n  /.*test_queues_command.py:\d+ busy.<locals>.stay$", told, re.MULTILINE)
    (row,) = command("running", "q", "--stacks", "--json").json
    assert row["stack"][0].endswith("busy.<locals>.stay")


def test_running_says_which_process_tells_no_stack_and_which_handler_has_ended(
    command, alive, queue, client, monkeypatch
):
    monkeypatch.setattr("reliq.admin.workers.STACK_LOOK_SECONDS", 0)
    monkeypatch.setattr("reliq.cli.running.STACK_SECONDS", 0)
    queue.publish({})
    alive("w1", running=(Slot("q", "held", 1, time.time()),))

    assert "no answer: a handler holds the interpreter" in command("running", "q", "--stacks").out
    assert command("running", "q", "--stacks", "--json").json[0]["stack"] is None


def test_nothing_runs(command, queue):
    queue.publish({})

    assert command("running", "q").out == "Nothing runs.\n"
    assert command("running", "q", "--longer-than", "2h").out == "Nothing runs for 2h.\n"


# ---- account ----------------------------------------------------------------


def test_an_account_that_adds_up_exits_0(command, queue, die):
    queue.publish_many({"n": number} for number in range(5))
    with queue.receive(limit=2):
        pass
    queue.publish({}, delay=60, id="off")
    queue.cancel("off")

    done = command("account", "q")

    assert done.code == 0
    assert done.out.rstrip().endswith("It adds up.")
    told = command("account", "q", "--json").json
    numbers = ("published", "redriven", "acked", "cancelled", "alive", "missing", "balanced")
    assert [told[name] for name in numbers] == [6, 0, 2, 1, 3, 0, True]


def test_an_account_that_does_not_add_up_exits_1_and_says_by_how_much(command, queue, client):
    queue.publish_many({"n": number} for number in range(5))
    client.rpop(queue.keys.ready, 2)

    done = command("account", "q")

    assert done.code == 1
    assert "It does not add up: what came in is 2 more than what has ended or is alive." in done.out
    assert command("account", "q", "--json").json["missing"] == 2


def test_an_account_with_too_many_says_so(command, queue, client):
    queue.publish({})
    client.lpush(queue.keys.ready, "stowaway")

    done = command("account", "q")

    assert done.code == 1
    assert "what has ended or is alive is 1 more than what came in" in done.out


# ---- wrong usage --------------------------------------------------------------


@pytest.mark.parametrize("words", [["running"], ["account"], ["ends"], ["show", "x"]], ids=lambda words: words[0])
def test_an_unknown_queue_is_one_line_and_exit_2(command, queue, words):
    name, *rest = words

    done = command(name, "oders", *rest)

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("reliq: there is no queue 'oders' here; `reliq queues --scan` lists what there is")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("words", [["running", "a b"], ["account", "a{b}"], ["queues", "--interval", "soon"]])
def test_what_cannot_be_is_one_line_and_exit_2(command, queue, words):
    done = command(*words)

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("words", [["queues"], ["workers"], ["account", "q"], ["watch"]], ids=lambda words: words[0])
def test_redis_away_is_one_line_and_exit_1(command, words, monkeypatch):
    monkeypatch.setattr("reliq.admin.session.PATIENCE_SECONDS", 0.01)

    done = command(*words, "--url", "redis://127.0.0.1:1/0")

    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith("reliq: ")


def test_a_program_may_name_queues(admin, url, queue):
    Queue("other", url=url).publish({})
    queue.publish({})

    assert [view.queue for view in admin.queues(["other"], interval=0).queues] == ["other"]
    with pytest.raises(ConfigurationError, match="there is no queue 'oders'"):
        admin.queues(["oders"], interval=0)


def test_a_program_gets_the_same_as_an_exception(admin, queue):
    with pytest.raises(ConfigurationError, match="there is no queue 'oders'"):
        admin.account("oders")


# ---- 80 columns -------------------------------------------------------------


def close_what_is_left_open_at_the_end_of_the_day(order: dict[str, str]) -> None:
    """Have a long name."""


@pytest.fixture
def in_columns(command, monkeypatch):
    """Run a command on a terminal of so many columns, without its colours."""

    def run(columns, *words):
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        return command(*words).out.splitlines()

    return run


def test_names_and_numbers_are_whole_in_80_columns(in_columns, url):
    for name in ("order-deadlines", "order-deadlines-late", "orders"):
        Queue(name, url=url).publish({})

    lines = in_columns(80, "queues", "--interval", "100ms")

    assert [line for line in lines if not line.startswith(" ")] == ["order-deadlines", "order-deadlines-late", "orders"]
    assert max(map(len, lines)) <= 80
    assert sum(re.search(r"ready 1  pending 0  leased 0", line) is not None for line in lines) == 3
    assert not any("…" in line for line in lines)


def test_rows_are_a_table_where_there_is_room(in_columns, queue):
    queue.publish({})

    lines = in_columns(120, "queues", "--interval", "0")

    assert [line.split()[0] for line in lines] == ["queue", "q"]


def test_a_worker_tells_its_handlers_on_a_narrow_terminal_with_their_whole_names(url, monkeypatch, capsys):
    """Each handler is a paragraph then; what it says goes to standard error."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    consumer, queues = Consumer(), [Queue(f"orders-of-the-branch-in-{town}", url=url) for town in ("Basel", "Bern")]
    for queue in queues:
        consumer.handler(queue)(close_what_is_left_open_at_the_end_of_the_day)

    _print_handlers(consumer.handlers, "2 processes of 1")

    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (printed.out, lines[0]) == ("", "2 processes of 1")
    assert [line for line in lines if line.startswith("orders")] == [queue.name for queue in queues]
    assert printed.err.count(f"handler {consumer.handlers[0].name}\n") == 2
    assert "…" not in printed.err


def test_long_texts_give_way_and_names_do_not(in_columns, die):
    die("order-1", "order-2", error="no such card " * 20)

    lines = in_columns(80, "dead", "list", "q")

    assert [line.split()[0] for line in lines] == ["id", "order-1", "order-2"]
    assert all("no such" in line and "…" in line and len(line) <= 80 for line in lines[1:])
