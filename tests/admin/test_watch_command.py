"""`reliq watch`: a screen that fits its terminal and leaves it clean, or a line for each look over a pipe."""

import json
import re
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
from rich.console import Console
from terminal import PATIENCE_SECONDS, Terminal

from reliq import Admin, Pause, Queue, commands
from reliq.admin import Failure, Moment, Overview, QueueView
from reliq.admin.ends import End
from reliq.cli.screen import Screen
from reliq.cli.watch import Interrupts, line_of, show
from reliq.embedded import EmbeddedRedis
from reliq.roster import Slot, Worker

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def watch(url):
    """Watch in a terminal of a size; the command ends with the test."""
    started = []

    def start(*words, columns=80, lines=24, at=url):
        words = ("watch", "--interval", "100ms", *words)
        started.append(Terminal(*words, columns=columns, lines=lines, url=at))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def scene(queue, client, die):
    """Something in every part of the screen: a late message, a failing one, a dead one, and who works."""
    die("order-42", error="no such card")
    queue.publish({}, id="failing")
    with queue.receive() as [job]:
        job.nack(delay=3600, reason="gateway down")
    queue.publish({}, delay=3600)
    client.set(queue.keys.msg("late"), b'RELIQ/1 {"d":%d,"r":3}\n{}' % ((time.time() - 300) * 1000))
    client.rpush(queue.keys.ready, "late")
    now = time.time()
    slot = Slot("q", "order-7", 1, now - 90)
    worker = Worker("w1", "db1", 4711, "1", ("q",), 8, 1, now - 3600, now, now, (slot,))
    for command in commands.write_worker(worker):
        client.execute_command(*command.command)
    client.persist("reliq:worker:w1")


@pytest.mark.parametrize(("columns", "lines", "signal_number"), [(80, 24, signal.SIGINT), (200, 50, signal.SIGTERM)])
def test_the_screen_fits_its_terminal_and_moves_and_leaves_it_clean(watch, scene, queue, columns, lines, signal_number):
    terminal = watch(columns=columns, lines=lines)

    rows = terminal.wait_for("no such card", "gateway down", "pid 4711", "acked ", "█")
    assert rows[0].startswith("reliq watch")
    assert rows[0].endswith("UTC, every 100ms")
    assert len(rows[0]) == columns
    # late, ready, pending, leased, backoff, retry, dead
    assert any(re.match(r"q +5m\w* +1 +1 +0 +1 +0 +1\b", row) for row in rows)
    assert any("db1 pid 4711  1 of 8 busy, up 1h" in row for row in rows)
    assert any(re.search(r"\dm\w* q order-7", row) for row in rows)

    queue.publish({})
    queue.publish({})
    terminal.wait_for(r"^q +5m\w* +3 ")

    assert terminal.end(signal_number) == 0
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    assert terminal.raw.rindex(SHOW) > terminal.raw.rindex(HIDE)
    assert b"Traceback" not in terminal.raw


class Interrupted(str):
    """A place at which Ctrl-C comes while it is drawn."""

    __slots__ = ()

    def __format__(self, _):
        signal.raise_signal(signal.SIGINT)
        return str(self)


def test_an_interrupt_in_the_middle_of_a_drawing_leaves_the_terminal_clean(queue, url, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.take)
    try:
        with pytest.raises(KeyboardInterrupt):
            show(Admin(url).watch(), Interrupted("redis://x"), 60.0, interrupts)
    finally:
        signal.signal(signal.SIGINT, before)

    drawn = capsys.readouterr().out
    assert drawn.count("\x1b[?1049h") == drawn.count("\x1b[?1049l") == 1
    assert "reliq watch  redis://x" in drawn


def test_while_redis_is_away_the_last_moment_stays_and_says_so(watch, server_path):
    with EmbeddedRedis(server=server_path) as server:
        Queue("here", url=server.url).publish({})
        terminal = watch(at=server.url)
        terminal.wait_for("here ")

    rows = terminal.wait_for("Redis does not answer, this is old")

    assert any(row.startswith("here ") for row in rows)
    assert terminal.end() == 0


# ---- over a pipe ------------------------------------------------------------


@pytest.fixture
def piped(url):
    started = []

    def start(*words):
        command = [sys.executable, "-m", "reliq", "watch", "--interval", "100ms", "--url", url, *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_over_a_pipe_there_is_a_line_for_each_look(piped, scene):
    process = piped("q")

    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)

    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ queues=1 late=5m", line) for line in lines)
    assert all("ready=1 pending=1 leased=0 backoff=1 retry=0 dead=1" in line for line in lines)
    assert "workers=1 busy=1/8" in lines[0]
    assert "last=q/order-42 dead rejected (delivery 1): no such card" in lines[0]
    assert process.wait(PATIENCE_SECONDS) == 0
    assert process.stderr.read() == ""


def test_json_over_a_pipe_is_all_that_is_seen_until_the_reader_has_enough(piped, scene):
    process = piped("--json")

    told = json.loads(process.stdout.readline())
    process.stdout.close()

    assert [view["queue"] for view in told["queues"]] == ["q"]
    assert told["workers"][0]["running"][0]["id"] == "order-7"
    assert [failure["ended"]["id"] for failure in told["ends"]] == ["order-42"]
    assert [(failure["error"], failure["count"]) for failure in told["errors"]] == [("gateway down", 1)]
    assert process.wait(PATIENCE_SECONDS) == 0
    assert process.stderr.read() == ""


@pytest.mark.parametrize("words", [["--interval", "10ms"], ["--interval", "soon"], ["a b"], ["q", "oders"]])
def test_watch_asked_for_wrongly_is_one_line_and_exit_2(command, queue, words):
    queue.publish({})

    done = command("watch", *words)

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


# ---- the lines themselves ---------------------------------------------------


def view(name, **fields):
    none = dict.fromkeys(("pending", "ready", "unack", "backoff", "retry", "garbage", "dead"), 0)
    about = {"layout": "reliq", "late": 0.0, "oldest": {}, "rates": None, "pause": None}
    return QueueView(queue=name, **{**none, **about, "workers": 0, "slots": 0, "busy": 0, **fields})


def moment(views=(), workers=(), ends=(), errors=()):
    return Moment(Overview(views, workers, (), {}, {}, 0.0), {}, ends, errors)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (40, 10), (20, 5)])
def test_whatever_there_is_fits(columns, lines):
    views = [view(f"queue-{number:03}-{'x' * 60}", ready=number, late=float(number)) for number in range(100)]
    slots = tuple(Slot("q" * 100, "i" * 100, 1, 0.0) for _ in range(200))
    workers = [Worker("w", "h" * 80, 1, "1", ("q",), 999, 200, 0, 0, 0, slots)] * 30
    ends = [Failure("q", End("i" * 100, "dead", 0.0), "failed", "e" * 500)] * 50

    shown = Screen(moment(views, workers, ends), "redis://x", 1.0).lines(columns, lines)

    assert len(shown) == lines
    if lines >= 24:
        assert any("more queues, less late than these" in line.plain for line in shown)
        assert any(line.plain.startswith("queue-099") for line in shown)
        assert sum(line.plain.startswith("00:00:00 dead") for line in shown) >= 3


@pytest.mark.parametrize("width", [80, 150, 200])
@pytest.mark.parametrize(
    "names", [("orders", "mails"), ("orders-of-the-shop", "orders-of-the-shop-late"), ("x" * 70 + "a", "x" * 70 + "b")]
)
def test_a_name_is_never_cut(names, width):
    shown = Screen(moment([view(name, ready=at + 7) for at, name in enumerate(names)]), "redis://x", 1.0).lines(
        width, 40
    )

    lines = [line.plain for line in shown]
    assert max(map(len, lines[2:8])) <= width
    for at, name in enumerate(names):
        here = next(number for number, line in enumerate(lines) if re.match(rf"{name}(\s|$)", line))
        assert any(re.search(rf" {at + 7} ", line) for line in lines[here : here + 2])


def test_who_paused_a_queue_stands_where_its_bar_was():
    paused = view("q", ready=3, pause=Pause("anna@db1", 0.0, "gateway down"))

    lines = [line.plain for line in Screen(moment([paused]), "redis://x", 1.0).lines(80, 24)]

    assert any("paused by anna@db1 " in line and "gateway down" in line for line in lines)
    assert not any("█" in line for line in lines)


def test_with_nobody_at_work_it_says_so():
    lines = [line.plain for line in Screen(moment([view("q")]), "redis://x", 1.0).lines(80, 24)]

    assert "no worker is alive" in lines


def test_what_a_terminal_would_obey_is_not_shown():
    evil = [Failure("q", End("\x1b[2J", "dead", 0.0, "failed", 1, "\x1b]0;title\x07"), "failed", "\x1b]0;title\x07")]
    errors = [Failure("q", None, "failed", "\x1b[31m", 1, 2)]
    workers = [Worker("w", "h", 1, "1", ("q",), 1, 1, 0, 0, 0, (Slot("q", "\x1b[2J", 1, 0.0),))]
    seen = moment([view("q")], workers, evil, errors)

    lines = [line.plain for line in Screen(seen, "redis://x", 1.0).lines(200, 50)]

    assert not any("\x1b" in line or "\x07" in line for line in [*lines, line_of(seen)])


def test_not_even_a_name_or_a_place_is_drawn_as_it_came():
    drawn = StringIO()

    Console(file=drawn, width=80, height=24).print(Screen(moment([view("q\x9b2J")]), "redis://\x1b[2J", 1.0))

    assert "\x1b" not in drawn.getvalue()
    assert "\x9b" not in drawn.getvalue()
    assert "q\N{REPLACEMENT CHARACTER}2J" in drawn.getvalue()
