"""`reliq watch`: the screen fits its terminal and is removed at the end."""

import re
import signal
import time
from functools import partial

import pytest
from ports import free_port
from rich.console import Console

from reliq import Admin, Pause, Queue
from reliq.admin import Overview, QueueSample, QueueSnapshot
from reliq.admin.messages import MessageEvent
from reliq.cli.watch import draw, show
from reliq.redis.commands import RunningJob, Worker
from reliq.testing.server import EmbeddedRedis

pytestmark = pytest.mark.slow

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def watch(terminal):
    """Run `reliq watch` in a terminal of the given size."""
    return partial(terminal, "watch", "--interval", "100ms")


@pytest.fixture
def scene(queue, client, die, alive):
    """Fill every part of the screen: a late message, a failing message, a dead letter, and workers."""
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

    rows = terminal.wait_for("no such card", "gateway down", "4711")
    assert re.search(r"^reliq watch  redis://\S+  \d\d:\d\d:\d\d UTC, every 100ms$", rows[0])
    assert rows[1].startswith("1 queue, 1 worker, 1 of 8 slots busy, Redis uses ")
    # late, ready, pending, running, backoff, retry, dead
    assert any(re.match(r"q +\d+m\w* +1 +1 +0 +1 +0 +1\b", row) for row in rows)
    assert any(re.match(r"db1 pid 4711  1 of 8 busy, up 1h, claimed .* ago: 1m", row) for row in rows)

    queue.publish({})
    queue.publish({})
    terminal.wait_for(r"^q +\d+m\w* +3 ")

    assert terminal.end(number) == 0
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    assert terminal.raw.rindex(SHOW) > terminal.raw.rindex(HIDE)
    assert b"Traceback" not in terminal.raw


class Interrupted(str):
    """Raise KeyboardInterrupt while this place is drawn."""

    __slots__ = ()

    def __format__(self, _):
        signal.raise_signal(signal.SIGINT)
        return str(self)


def test_interrupt_during_a_redraw_leaves_the_terminal_clean(queue, url, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")

    show(Admin(url).watch(), Interrupted("redis://x"), 60.0)

    drawn = capsys.readouterr().out
    assert drawn.count("\x1b[?1049h") == drawn.count("\x1b[?1049l") == 1
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_watch_keeps_the_last_look_while_redis_is_away_and_recovers(watch, server_path):
    with EmbeddedRedis(server=server_path, options={"appendonly": "yes", "appendfsync": "always"}) as server:
        Queue("here", url=server.url).publish({})
        terminal = watch(url=server.url, columns=80)
        terminal.wait_for("^here ")

        server.kill()
        rows = terminal.wait_for("Redis does not answer, these figures are old: ")
        assert any(row.startswith("here ") for row in rows)

        server.start()
        terminal.wait_for("^1 queue, 0 workers", "^here ")

    assert terminal.end(signal.SIGINT) == 0


def test_watch_without_redis_prints_one_line_and_no_screen(watch):
    terminal = watch(url=f"redis://127.0.0.1:{free_port()}/0")

    assert terminal.end() == 1
    assert re.fullmatch(r"reliq: .*Connection refused.*\n", terminal.text)
    assert ENTER not in terminal.raw


def test_watch_without_a_terminal_names_the_command_for_scripts(command, queue):
    told = command("watch")

    assert (told.code, told.out) == (2, "")
    assert told.err == "reliq: reliq watch needs a terminal; elsewhere use `reliq queues --json`\n"


def view(name, **fields):
    none = dict.fromkeys(("pending", "ready", "unack", "backoff", "retry", "garbage", "dead"), 0)
    about = {"layout": "reliq", "late": 0.0, "oldest": {}, "rates": None, "pause": None}
    about |= {"overdue": 0, "paused": False, "totals": {}}
    return QueueSnapshot(queue=name, **{**none, **about, "workers": 0, "slots": 0, "busy": 0, **fields})


def sample(views=(), workers=(), ends=(), errors=()):
    return QueueSample(Overview(views, list(workers), {}, {}, 0.0), ends, errors)


def screen_lines(seen, columns=80, lines=24):
    console = Console(width=columns, height=lines)
    with console.capture() as captured:
        console.print(draw(console, seen, "redis://x", 1.0))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (20, 5)], ids=["80x24", "200x50", "20x5"])
def test_screen_shows_queues_workers_and_failures_whatever_there_is(columns, lines):
    views = [view(f"queue-{number:03}", ready=number, late=float(number)) for number in range(100)]
    slots = tuple(RunningJob("q" * 100, "i" * 100, 1, 0.0) for _ in range(200))
    workers = [Worker("w", "h" * 80, 1, "1", ("q",), 999, 200, 0, 0, 0, slots)] * 30
    ends = [("q", MessageEvent(0.0, "dead", "i" * 10, reason="failed", error="e" * 500))] * 50

    shown = screen_lines(sample(views, workers, ends), columns, lines)

    assert (len(shown), max(map(len, shown)) <= columns) == (lines, True)
    if lines < 24:
        return
    assert re.match(r"100 queues, the \d+ latest are shown, 30 workers", shown[1])
    assert any(line.startswith("queue-099 ") for line in shown)
    assert sum(line.startswith("00:00:00  q iiiiiiiiii dead") for line in shown) >= 3


@pytest.mark.parametrize("names", [("orders", "orders-late"), ("x" * 70 + "a", "x" * 70 + "b")], ids=["short", "long"])
def test_screen_never_cuts_a_queue_name(names):
    for width in (80, 150, 200):
        lines = screen_lines(sample([view(name, ready=at + 7) for at, name in enumerate(names)]), width, 40)

        assert max(map(len, lines)) <= width
        told = "".join(line.split()[0] for line in lines[3:] if line)
        assert [name in told for name in names] == [True, True]
        for at, name in enumerate(names):
            assert any(re.search(rf"^{name[:8]}\S* .* {at + 7} ", line) for line in lines)


def test_screen_shows_a_pause_as_text_and_that_no_worker_is_alive():
    lines = screen_lines(sample([view("q\x9b", ready=3, pause=Pause("anna@db1", 0.0, "gateway\x9b down"))]), 120)

    assert "\x9b" not in "".join(lines)
    assert any("paused by anna@db1 " in line and "gateway" in line for line in lines)
    assert "no worker is alive" in lines
