"""Every command over a queue of 300 hostile messages: nothing reaches the terminal but text, and nothing breaks."""

import http.server
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from hostile import NAMES, TEXTS, complaints, spoil
from ports import free_port
from terminal import Terminal
from test_every_command import COMMANDS, options
from waiting import eventually

from reliq import Layout, Queue
from reliq.cli.app import Commands
from reliq.keys import is_name
from reliq.shardmap import ShardMap

#: Commands that show nothing foreign, and why.
OF_THEIR_OWN = {
    "demo": "runs jobs of its own",
    "bench": "runs messages of its own",
    "config": "shows settings of its own, as tests/admin/test_config_command.py has it",
    "init": "writes a program of its own",
    "outbox sql": "shows SQL of its own",
    "outbox clean": "shows how many rows of a database it deleted, as tests/outbox has it",
    "outbox refused": "shows rows of a database, as tests/outbox has it",
    "outbox retry": "shows how many rows of a database it changed, as tests/outbox has it",
    "relay": "moves rows of a database, as tests/outbox has it",
    "worker": "shows its own handlers; what it logs is in tests/metrics/test_logs.py and tests/worker",
}
#: Commands that run until they are told to stop, or ask no Redis, each with a test below, or in tests/web.
BY_THEMSELVES = {"watch", "exporter", "health", "web"}
#: The words after a command's name, and its exit code as its help says. `ID0` and so on are ids of the queue.
ERRANDS = {
    "queues": [(["--interval", "0"], 0), (["q", "spoilt", "--interval", "0"], 0), (["--scan"], 0)],
    "workers": [([], 0)],
    "running": [(["q"], 0)],
    "keys": [(["q"], 0), (["q", "--all"], 0), (["q", "--key", "\x1b[2J"], 2), (["\x1b[2J"], 2)],
    "limits": [
        (["q"], 2),
        (["q", "--clear", "\x1b[2J"], 2),
        (["q", "--weight", "\x1b[2J=3"], 2),
        (["q", "--per-key", "2", "--clear", "weights"], None),  # refused while an old worker serves it
        (["q"], None),
    ],
    "list": [
        (["q", "--limit", "500", "--state", state], 0)
        for state in ("pending", "ready", "waiting", "unack", "retry", "garbage")
    ]
    + [
        (["q", "--limit", "500", "--state", "dead"], 0),
        (["q", "--key", "\x1b[2J\x1b[31m"], 0),
        (["q", "--match", "\x1b"], 0),
        (["\x1b[2J"], 2),
    ],
    "show": [(["q", f"ID{at}"], 0) for at in (*range(9), *range(45, 60))] + [(["q", "\x1b[2J"], 2)],
    "ends": [(["q"], 0), (["q", "--kind", "acked"], 0), (["q", "--kind", "\x9b"], 2)],
    "publish": [(["q", '"\x9b"', "--id", "new"], 0), (["q", "{}", "--id", "\x1b[2J"], 2)],
    "cancel": [(["q", "nobody"], 2), (["q", "--state", "pending", "--yes"], 0)],
    "move": [(["q", "other", "--state", state, "--yes"], 0) for state in ("pending", "ready", "retry", "unack")],
    "purge": [
        (["q", "--state", state, "--yes"], 0)
        for state in ("pending", "ready", "waiting", "unack", "retry", "garbage", "dead")
    ],
    "pause": [
        (["q", "--key", "\x1b[2J"], 2),
        (["q", "--key", "tenant", "--for", "1m"], 0),
        (["q", "--reason", "\x1b[2J"], 2),
        (["q", "--reason", ":id: [b]"], 0),
    ],
    "resume": [(["q"], 0), (["q", "--key", "\x1b[2J"], 2), (["q", "--key", "tenant"], 0)],
    "forget": [(["q", "--yes"], 2), (["\x1b[2J", "--yes"], 2), (["spoilt", "--yes"], 0)],
    "cron list": [([], 0), (["q"], 0), (["\x1b[2J"], 2)],
    "cron run": [(["daily"], 2), (["\x1b[2J"], 2), (["\x1b[2J", "--queue", "q"], 2)],
    "cron pause": [(["daily"], 0), (["daily", "--reason", "\x1b[2J"], 2), (["\x9b", "--queue", "q"], 2)],
    "cron resume": [(["daily", "--queue", "q"], 0), (["\x9b"], 2)],
    "cron forget": [(["daily"], 0), (["\x9b"], 2)],
    "scripts load": [([], 0)],
    "shards": [
        (["q"], 0),
        (["q", "3", "--yes"], 2),
        (["\x1b[2J"], 2),
        (["q", "8", "--yes"], None),
        (["q", "--finish"], None),
    ],
    "account": [(["q"], 1), (["spoilt"], 1)],
    "check": [(["q"], 1), (["q", "--repair"], 1), (["spoilt"], 1)],
    "doctor": [([], None)],
    "acl": [(["--role", "producer", "--queue", "q"], 0), (["--role", "\x1b[2J", "--queue", "q"], 2)],
    "dead list": [(["q", "--limit", "500"], 0), (["q", "--reason", "\x1b"], 2), (["q", "--group"], 0)],
    "dead show": [(["q", f"ID{at}"], 0) for at in (*range(9), *range(45, 60))] + [(["q", "\x9b"], 2)],
    "dead redrive": [(["q", "--all", "--yes", "--to", "other"], 0), (["q", "\x9b"], 2), (["q", "--all", "--yes"], 0)],
    "dead purge": [(["q", "\x9b", "--yes"], 2), (["q", "--all", "--yes"], 0)],
}


def get(port, path):
    """Return a page of this machine, nothing when it is not served."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def strict(text):
    """Read JSON as the standard has it."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def words_of(words, ids):
    """Put ids where a command's words name them."""
    return [
        ids[int(one[2:])].decode("utf-8", "surrogateescape") if re.fullmatch(r"ID\d+", one) else one for one in words
    ]


def test_every_command_is_sent_over_the_hostile_queue():
    unsent = COMMANDS.keys() - ERRANDS.keys() - BY_THEMSELVES - OF_THEIR_OWN.keys()

    assert unsent == set(), "give the new command its words and exit codes in ERRANDS"


@pytest.fixture
def hostile(url, client):
    """Spoil the queue anew; return its ids."""
    Queue("other", bytes, url=url).publish(b"x")
    return lambda: spoil(client)


#: Commands that lay out what they show by the width of the terminal.
WIDE = {"queues", "workers", "running", "list", "ends", "dead list", "cron list"}
MODES = [(name, "over a pipe") for name in ERRANDS] + [(name, "in 80 columns") for name in ERRANDS if name in WIDE]
MODES += [(name, "as JSON") for name in ERRANDS if "--json" in options(name)]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_command_shows_text_alone_and_exits_as_its_help_says(name, mode, command, hostile, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    if mode == "in 80 columns":
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    ids = hostile()
    for words, code in ERRANDS[name]:
        done = command(*name.split(), *words_of(words, ids), *(["--json"] if mode == "as JSON" else []))

        assert complaints(done.out + done.err) == [], words
        assert done.code == code or code is None, (words, done.err)
        assert done.err.count("\n") <= 1, done.err
        if mode == "as JSON" and done.code == 0:
            strict(done.out)


# ---- what runs until it is told to stop, or asks no Redis ---------------------


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_watch_over_a_pipe_writes_lines_of_text(words, hostile, url):
    hostile()
    watch = subprocess.Popen(
        [sys.executable, "-m", "reliq", "watch", "--url", url, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    line = watch.stdout.readline().decode("ascii" if words else "utf-8")
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=60)

    assert (complaints(line), err, watch.returncode) == ([], b"", 0)
    assert not words or strict(line)["queues"]


def test_the_screen_of_watch_in_80_columns_shows_text_alone(hostile, url):
    hostile()
    terminal = Terminal("watch", columns=80, lines=40, url=url)
    try:
        terminal.wait_for("failures", "retrying, ", "pid 1000000000")
        code = terminal.end(signal.SIGINT)
        shown = terminal.raw.decode("utf-8", "strict")
    finally:
        terminal.close()

    styles = re.compile(r"\x1b\[[0-9;]*[mHKJ]|\x1b\[\?(25|1049)[hl]|\r")
    assert (code, complaints(styles.sub("", shown))) == (0, [])
    assert b"\x1b[2J\x1b[31m" not in terminal.raw


def test_the_exporter_stays_up(hostile, url):
    hostile()
    port = free_port()
    exporter = subprocess.Popen(
        [sys.executable, "-m", "reliq", "exporter", "--url", url, "--port", str(port)], stderr=subprocess.PIPE
    )
    try:
        eventually(lambda: get(port, "/live"), "the exporter serves")
        page, ready = get(port, "/metrics"), get(port, "/ready")
    finally:
        exporter.terminate()
        _, err = exporter.communicate(timeout=60)

    assert (ready, complaints(page), complaints(err.decode())) == ("ok\n", [], [])
    assert "reliq_redis_up 1\n" in page
    assert 'reliq_queues_left_out{reason="unreadable"} 1\n' in page


@pytest.mark.parametrize("status", [200, 503])
def test_health_shows_what_answers_as_text(status, command):
    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"\n".join(TEXTS))

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hostile) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        done = command("health", "ready", "--port", server.server_address[1])
        answering.join()

    assert (done.code, complaints(done.out + done.err)) == (0 if status == 200 else 1, [])


def test_a_stdout_of_ascii_alone_takes_every_id(hostile, url):
    hostile()
    environment = {**os.environ, "RELIQ_URL": url, "PYTHONIOENCODING": "ascii:strict"}
    words = [sys.executable, "-m", "reliq", "list", "q", "--limit", "500"]
    done = subprocess.run(words, env=environment, capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, b"")
    assert complaints(done.stdout.decode("ascii")) == []


# ---- good messages among them ----------------------------------------------


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_a_move_goes_on_past_the_bad_ones_and_says_so(state, hostile, command, queue, url):
    hostile()
    orders = [f"good-{number}" for number in range(50)]
    for id in orders:
        queue.publish({"id": id}, id=id, delay=3600 if state == "pending" else 0)

    done = command("move", "q", "other", "--state", state, "--yes", "--json")

    other = Queue("other", url=url)
    assert [other.reschedule(id, delay=7200) for id in orders] == ["rescheduled"] * 50
    other.close()
    assert done.code == 0
    assert done.json["kept"] > 0
    assert done.json["found"] == sum(done.json[name] for name in ("moved", "kept", "running", "gone"))


def test_a_redrive_to_another_queue_goes_on_past_the_bad_ones_and_says_so(hostile, command, die):
    die(*(f"good-{number}" for number in range(20)))
    hostile()

    done = command("dead", "redrive", "q", "--all", "--to", "other", "--yes", "--json")

    assert done.code == 0
    assert done.json["kept"] > 0
    assert done.json["redriven"] > 20
    assert done.json["found"] == sum(done.json[name] for name in ("redriven", "kept", "alive", "gone"))


# ---- commands that outputs name, for a person to run next ----------------------

LAYOUTS = Layout.hdt3213(prefix="a;b"), Layout.RELIQ
#: A periodic entry.
ENTRY = "da`ily;ls"
#: What names a command in its output or in an error, on a queue of either layout.
NAMING = [
    ["pause", "--", "QUEUE"],
    ["pause", "--key", "k`s; ls", "--", "QUEUE"],
    ["queues", "--interval", "0"],
    ["keys", "--", "QUEUE"],
    ["limits", "--", "QUEUE"],
    ["limits", "--rate", "9/s", "--", "QUEUE"],
    ["shards", "--", "QUEUE"],
    ["shards", "--yes", "--", "QUEUE", "8"],
    ["move", "--state", "dead", "--yes", "--", "QUEUE", "other"],
    ["move", "--state", "ready", "--yes", "--", "QUEUE", "other"],
    ["cron", "pause", "--queue=QUEUE", ENTRY],
    ["check", "--", "QUEUE"],
    ["account", "--", "QUEUE"],
    ["forget", "--yes", "--", "QUEUE"],
    ["doctor"],
]


def named_commands(text):
    """Yield the words of each command that a text names with arguments, as a shell splits them."""
    names = "|".join(sorted(COMMANDS, key=len, reverse=True))
    for found in re.finditer(rf"reliq ({names}) (.+)", text):
        words = shlex.shlex(found[2], posix=True, punctuation_chars="`;")
        words.whitespace_split, words.commenters = True, ""
        yield found[1].split(), list(itertools.takewhile(lambda word: word[0] not in "`;", iter(words.get_token, None)))


def parsed(command, words):
    """Return the parameters of a command as it reads its words."""
    found = Commands.load(command[0])
    for name in command[1:]:
        found = found.commands[name]
    return found.make_context(" ".join(command), words, resilient_parsing=True).params


@pytest.fixture
def named(url, client):
    """Make a queue of that name and layout whose limits, sleep, shards and move give the commands something to say."""

    def make(name, layout):
        Queue("other", bytes, url=url, layout=layout).publish(b"x")
        queue = Queue(name, bytes, url=url, layout=layout)
        queue.publish(b"x")
        client.hset(queue.keys.cron, f"{ENTRY} schedule", "every 60")
        client.set(queue.keys.moving, name)
        if not layout.bare:
            client.hset(queue.keys.limits, mapping={"on": "1", "weight:k": "nonsense"})
            client.zadd(queue.keys.asleep, {"": time.time() + 9999})
            client.set(queue.keys.map, ShardMap(3, 8, 1, "growing").text)
        queue.close()

    return make


@pytest.mark.parametrize(("name", "layout"), [(one, of) for of in LAYOUTS for one in NAMES if is_name(one, of)])
def test_commands_that_outputs_name_read_a_hostile_name_as_it_is(name, layout, command, named):
    named(name, layout)
    seen = set()
    for words in NAMING:
        at = 2 if words[0] in ("cron", "dead") else 1
        of = ["--layout", layout] if "--layout" in options(" ".join(words[:at])) else []
        done = command(*words[:at], *of, *(word.replace("QUEUE", name) for word in words[at:]))
        for what, rest in named_commands(done.out + done.err):
            given = parsed(what, rest)
            seen.add(" ".join(what))
            if what[0] == "cron":
                assert given["name"] == ENTRY, done
            elif given.get("queue", name) != "QUEUE":
                assert given.get("queue", name) == name, done
                assert given.get("layout", "reliq") == str(layout) or "queue" not in given, done

    assert seen >= {"resume", "pause", "dead redrive", "move", "cron resume"}
    assert layout.bare or seen >= {"limits", "shards"}
