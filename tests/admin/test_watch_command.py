"""`reliq watch`: a screen that fits its terminal and leaves it clean, or a line for each look over a pipe."""

import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from terminal import PATIENCE_SECONDS

from reliq import Admin, Pause, Queue
from reliq.admin import Failure, Overview, QueueSample, QueueSnapshot
from reliq.admin.messages import MessageEvent
from reliq.cli.watch import Interrupts, Screen, line_of, show
from reliq.redis.commands import RunningJob, Worker
from reliq.testing.server import EmbeddedRedis

pytestmark = pytest.mark.slow

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def watch(terminal):
    """Watch in a terminal of a size."""
    return partial(terminal, "watch", "--interval", "100ms")


@pytest.fixture
def scene(queue, client, die, alive):
    """Something in every part of the screen: a late message, a failing one, a dead one, and who works."""
    die("order-42", error="no such card")
    queue.publish({}, id="failing")
    with queue.receive() as [job]:
        job.nack(delay=3600, reason="gateway down")
    queue.publish({}, delay=3600)
    client.set(queue.keys.msg("late"), b'RELIQ/1 {"d":%d,"r":3}\n{}' % ((time.time() - 300) * 1000))
    client.rpush(queue.keys.ready, "late")
    now = time.time()
    alive(pid=4711, slots=8, started=now - 3600, running=(RunningJob("q", "order-7", 1, now - 90),))
    client.persist("reliq:worker:w1")


@pytest.mark.parametrize(
    ("columns", "lines", "number"), [(80, 24, signal.SIGINT), (200, 50, signal.SIGTERM)], ids=["80x24", "200x50"]
)
def test_watch_fits_its_terminal_moves_and_leaves_it_clean(watch, scene, queue, columns, lines, number):
    terminal = watch(columns=columns, lines=lines)

    rows = terminal.wait_for("no such card", "gateway down", "pid 4711", "acked ", "█")
    assert rows[0].startswith("reliq watch")
    assert rows[0].endswith("UTC, every 100ms")
    assert len(rows[0]) == columns
    # late, ready, pending, leased, backoff, retry, dead
    assert any(re.match(r"q +\d+m\w* +1 +1 +0 +1 +0 +1\b", row) for row in rows)
    assert any("db1 pid 4711  1 of 8 busy, up 1h" in row for row in rows)
    assert any(re.search(r"\dm\w* q order-7", row) for row in rows)

    queue.publish({})
    queue.publish({})
    terminal.wait_for(r"^q +\d+m\w* +3 ")

    assert terminal.end(number) == 0
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    assert terminal.raw.rindex(SHOW) > terminal.raw.rindex(HIDE)
    assert b"Traceback" not in terminal.raw


class Interrupted(str):
    """A place at which Ctrl-C comes while it is drawn."""

    __slots__ = ()

    def __format__(self, _):
        signal.raise_signal(signal.SIGINT)
        return str(self)


def test_interrupt_during_a_redraw_leaves_the_terminal_clean(queue, url, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.handle_signal)
    try:
        with pytest.raises(KeyboardInterrupt):
            show(Admin(url).watch(), Interrupted("redis://x"), 60.0, interrupts)
    finally:
        signal.signal(signal.SIGINT, before)

    drawn = capsys.readouterr().out
    assert drawn.count("\x1b[?1049h") == drawn.count("\x1b[?1049l") == 1
    assert "reliq watch  redis://x" in drawn


def test_watch_without_redis_keeps_the_last_look_and_says_so(watch, server_path):
    with EmbeddedRedis(server=server_path) as server:
        Queue("here", url=server.url).publish({})
        terminal = watch(url=server.url, columns=80)
        terminal.wait_for("here ")

    rows = terminal.wait_for("Redis does not answer, this is old")

    assert any(row.startswith("here ") for row in rows)
    assert terminal.end(signal.SIGINT) == 0


def test_watch_over_a_pipe_prints_a_line_for_each_look_until_it_is_closed(scene, url):
    command = [sys.executable, "-m", "reliq", "watch", "--interval", "100ms", "--url", url, "q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr.read() == ""

    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ queues=1 late=\d+m", line) for line in lines)
    assert all("ready=1 pending=1 leased=0 backoff=1 retry=0 dead=1" in line for line in lines)
    assert "workers=1 busy=1/8" in lines[0]
    assert "last=q/order-42 dead rejected (delivery 1): no such card" in lines[0]


def view(name, **fields):
    none = dict.fromkeys(("pending", "ready", "unack", "backoff", "retry", "garbage", "dead"), 0)
    about = {"layout": "reliq", "late": 0.0, "oldest": {}, "rates": None, "pause": None}
    about |= {"overdue": 0, "paused": False, "totals": {}}
    return QueueSnapshot(queue=name, **{**none, **about, "workers": 0, "slots": 0, "busy": 0, **fields})


def moment(views=(), workers=(), ends=(), errors=()):
    return QueueSample(Overview(views, workers, {}, {}, 0.0), {}, ends, errors)


def screen_lines(seen, columns=80, lines=24):
    return [line.plain for line in Screen(seen, "redis://x", 1.0).lines(columns, lines)]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (20, 5)], ids=["80x24", "200x50", "20x5"])
def test_screen_fits_whatever_there_is(columns, lines):
    views = [view(f"queue-{number:03}-{'x' * 60}", ready=number, late=float(number)) for number in range(100)]
    slots = tuple(RunningJob("q" * 100, "i" * 100, 1, 0.0) for _ in range(200))
    workers = [Worker("w", "h" * 80, 1, "1", ("q",), 999, 200, 0, 0, 0, slots)] * 30
    ends = [Failure("q", MessageEvent(0.0, "dead", "i" * 100), "failed", "e" * 500)] * 50

    shown = screen_lines(moment(views, workers, ends), columns, lines)

    assert len(shown) == lines
    if lines >= 24:
        assert any("more queues, less late than these" in line for line in shown)
        assert any(line.startswith("queue-099") for line in shown)
        assert sum(line.startswith("00:00:00 dead") for line in shown) >= 3


@pytest.mark.parametrize("names", [("orders", "orders-late"), ("x" * 70 + "a", "x" * 70 + "b")], ids=["short", "long"])
def test_screen_never_cuts_a_queue_name(names):
    for width in (80, 150, 200):
        lines = screen_lines(moment([view(name, ready=at + 7) for at, name in enumerate(names)]), width, 40)

        assert max(map(len, lines[2:8])) <= width
        for at, name in enumerate(names):
            here = next(number for number, line in enumerate(lines) if re.match(rf"{name}(\s|$)", line))
            assert any(re.search(rf" {at + 7} ", line) for line in lines[here : here + 2])


def test_screen_and_lines_show_a_pause_as_text_and_that_no_worker_is_alive():
    assert "\x9b" not in line_of(moment([view("q\x9b", pause=Pause("anna@db1", 0.0, "gateway down"))]))
    lines = screen_lines(moment([view("q", ready=3, pause=Pause("anna@db1", 0.0, "gateway down"))]))

    assert any("paused by anna@db1 " in line and "gateway down" in line for line in lines)
    assert not any("█" in line for line in lines)
    assert "no worker is alive" in lines
