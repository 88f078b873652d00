"""Every command on a queue of 1,000 hostile messages prints safe text only, and does not fail."""

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
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hostile import NAMES, TEXTS, complaints, spoil
from ports import free_port
from rich.cells import cell_len
from test_every_command import COMMANDS, options
from waiting import eventually
from worker_process import Command

from reliq import Layout, Queue
from reliq.cli.app import Commands
from reliq.keys import is_name
from reliq.redis.shards import ShardMap

pytestmark = pytest.mark.slow

#: Commands that print nothing from Redis, or whose output other folders test.
OF_THEIR_OWN = {"demo", "bench", "init", "relay", "worker"}
OF_THEIR_OWN |= {"outbox sql", "outbox clean", "outbox retry"}
#: Commands that run until a signal stops them, or do not read Redis; tested below or in tests/web.
BY_THEMSELVES = {"watch", "exporter", "health", "web"}
#: Command -> its calls: the expected exit code (?: 0 or 1) and the words after the command's name.
#: CLEAR clears a terminal; STATE, MOVABLE and ID are replaced by each state and by ids of the queue.
ERRANDS = {
    "queues": "0; 0 q spoilt; 0 --scan; 1 q --check",
    "workers": "0; 0 q; 0 --running; 0 q --running; 2 CLEAR --running",
    "keys": "0 q; 0 q --all; 2 q --key CLEAR; 2 CLEAR",
    "limits": "2 q; 2 q --clear CLEAR; 2 q --weight CLEAR=3; ? q --per-key 2 --clear weights; ? q",
    "list": "0 q --limit 1000 --state STATE; 0 q --key CLEAR\x1b[31m; 0 q --match \x1b; 2 CLEAR; "
    "0 q --group; 2 q --state dead --reason \x1b; 0 q --kind acked; 2 q --kind \x9b",
    "show": "0 q ID; 2 q CLEAR",
    "publish": '0 q "\x9b" --id new; 2 q {} --id CLEAR',
    "cancel": "2 q nobody; 0 q --state pending --yes",
    "move": "0 q other --state MOVABLE --yes",
    "purge": "0 q --state PURGEABLE --yes; 2 q \x9b --state dead --yes",
    "pause": "2 q --key CLEAR; 0 q --key tenant --for 1m; 2 q --reason CLEAR; 0 q --reason :id:[b]; "
    "0 q --cron daily; 2 q --cron daily --reason CLEAR; 2 q --cron \x9b",
    "resume": "0 q; 2 q --key CLEAR; 0 q --key tenant; 0 q --cron daily; 2 q --cron \x9b",
    "delete": "2 q --yes; 2 CLEAR --yes; 0 spoilt --yes; 0 q --cron daily --yes; 2 q --cron \x9b --yes",
    "cron list": "0; 0 q; 2 CLEAR",
    "schedules": "0 q; 0 q --prefix CLEAR; 2 CLEAR",
    "cron run": "2 q daily; 2 q CLEAR; 2 CLEAR daily",
    "shards": "0 q; 2 q 3 --yes; 2 CLEAR; ? q 8 --yes; ? q --finish",
    "check": "1 q; 1 q --repair; 1 spoilt",
    "doctor": "?",
    "acl": "0 --role producer --queue q; 2 --role CLEAR --queue q; 0 --load; 2",
    "redrive": "0 q --all --yes --to other; 2 q \x9b; 0 q --all --yes",
}


def strict(text):
    """Parse JSON strictly by the standard."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def calls_of(name, ids):
    """Yield the words and the exit code of each call of a command."""
    movable = ("pending", "ready", "retry", "unack")
    texts = [ids[at].decode("utf-8", "surrogateescape") for at in (*range(9), *range(45, 60))]
    each = {
        "STATE": (*movable, "waiting", "garbage", "dead", "ended"),
        "PURGEABLE": (*movable, "waiting", "garbage", "dead"),
        "MOVABLE": movable,
        "ID": texts,
    }
    for call in ERRANDS[name].split("; "):
        code, *words = (word.replace("CLEAR", "\x1b[2J") for word in call.split(" "))
        kind = next((word for word in words if word in each), None)
        for value in each.get(kind, [""]):
            yield [value if word == kind else word for word in words], None if code == "?" else int(code)


def test_every_command_runs_over_the_hostile_queue():
    unsent = COMMANDS.keys() - ERRANDS.keys() - BY_THEMSELVES - OF_THEIR_OWN

    assert unsent == set(), "give the new command its words and exit codes in ERRANDS"


@pytest.fixture
def hostile(url, client):
    """Fill the queue with hostile data again; return its ids."""
    Queue("other", bytes, url=url).publish(b"x")
    return lambda: spoil(client)


#: Commands that fit their output to the width of the terminal.
WIDE = {"queues", "workers", "list", "cron list"}
MODES = [(name, "over a pipe") for name in ERRANDS] + [(name, "in 80 columns") for name in ERRANDS if name in WIDE]
MODES += [(name, "as JSON") for name in ERRANDS if "--json" in options(name)]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_command_prints_text_only_and_exits_as_its_help_says(name, mode, command, hostile, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    if mode == "in 80 columns":
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    ids = hostile()
    for words, code in calls_of(name, ids):
        done = command(*name.split(), *words, *(["--json"] if mode == "as JSON" else []))

        assert complaints(done.out + done.err) == [], words
        assert done.code == code or code is None, (words, done.err)
        assert done.err.count("\n") <= 1, done.err
        if mode == "in 80 columns" and name in {"list", "workers"}:  # the others print remarks below their tables
            assert max(map(cell_len, done.out.splitlines()), default=0) <= 80, words
        if mode == "as JSON" and done.code == 0:
            strict(done.out)


def test_screen_of_watch_in_80_columns_shows_text_only(hostile, terminal):
    hostile()
    watch = terminal("watch", columns=80, lines=40)
    watch.wait_for("^failures$", "^retrying ", "pid 1000000000")
    code = watch.end(signal.SIGINT)

    shown = re.sub(r"\x1b\[[0-9;]*[mHKJ]|\x1b\[\?(25|1049)[hl]|\r", "", watch.raw.decode("utf-8", "strict"))
    assert (code, complaints(shown)) == (0, [])
    assert b"\x1b[2J\x1b[31m" not in watch.raw


def test_exporter_serves_metrics_of_a_hostile_queue(hostile, url):
    hostile()
    port = free_port()
    words = ["exporter", "--url", url, "--port", str(port)]

    def get(path):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read().decode()

    with closing(Command(Path.cwd(), dict(os.environ), *words)) as exporter:
        page = eventually(lambda: get("/metrics"), "the exporter serves")
        ready = get("/ready")

    assert (ready, complaints(page), complaints("".join(exporter.lines))) == ("ok\n", [], [])
    assert re.search(r"\nreliq_redis_up.* 1\n", page)
    assert len(re.findall(r"\nreliq_queue_unreadable.* 1\n", page)) == 1


@pytest.mark.parametrize("status", [200, 503])
def test_health_prints_the_answer_as_text(status, command):
    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(status)
            self.end_headers()
            self.wfile.write(b"\n".join(TEXTS))

    with http.server.HTTPServer(("127.0.0.1", 0), Hostile) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        done = command("health", "ready", "--port", server.server_address[1])
        answering.join()

    assert (done.code, complaints(done.out + done.err)) == (0 if status == 200 else 1, [])


def test_list_prints_every_id_to_an_ascii_stdout(hostile, url):
    hostile()
    environment = {**os.environ, "RELIQ_URL": url, "PYTHONIOENCODING": "ascii:strict"}
    words = [sys.executable, "-m", "reliq", "list", "q", "--limit", "500"]
    done = subprocess.run(words, env=environment, capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, b"")
    assert complaints(done.stdout.decode("ascii")) == []


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_move_continues_past_bad_messages_and_counts_them(state, hostile, command, queue, url):
    hostile()
    orders = [f"good-{number}" for number in range(50)]
    for id in orders:
        queue.publish({"id": id}, id=id, delay=3600 if state == "pending" else 0)

    told = command("move", "q", "other", "--state", state, "--yes", "--json").json

    other = Queue("other", url=url)
    assert [other.reschedule(id, delay=7200) for id in orders] == ["rescheduled"] * 50
    assert told["kept"] > 0
    assert told["found"] == sum(told[name] for name in ("done", "kept", "running", "gone"))


def test_redrive_continues_past_bad_letters_and_counts_them(hostile, command, die):
    die(*(f"good-{number}" for number in range(20)))
    hostile()

    told = command("redrive", "q", "--all", "--to", "other", "--yes", "--json").json

    assert told["kept"] > 0
    assert told["done"] > 20
    assert told["found"] == told["done"] + told["kept"]


LAYOUTS = Layout.hdt3213(prefix="a;b"), Layout.RELIQ
#: A periodic job.
ENTRY = "da`ily;ls"
#: Lines that name a command in its output or in an error, on a queue of either layout.
NAMING = [
    ["pause", "--", "QUEUE"],
    ["pause", "--key", "k`s; ls", "--", "QUEUE"],
    ["queues"],
    ["keys", "--", "QUEUE"],
    ["limits", "--", "QUEUE"],
    ["limits", "--rate", "9/s", "--", "QUEUE"],
    ["shards", "--", "QUEUE"],
    ["shards", "--yes", "--", "QUEUE", "8"],
    ["move", "--state", "dead", "--yes", "--", "QUEUE", "other"],
    ["move", "--state", "ready", "--yes", "--", "QUEUE", "other"],
    ["pause", f"--cron={ENTRY}", "--", "QUEUE"],
    ["cron", "list", "--", "QUEUE"],
    ["check", "--", "QUEUE"],
    ["queues", "--check", "--", "QUEUE"],
    ["delete", "--yes", "--", "QUEUE"],
    ["doctor"],
]


def named_commands(text):
    """Yield the words of each command with arguments in a text, split as a shell does."""
    names = "|".join(sorted(COMMANDS, key=len, reverse=True))
    for found in re.finditer(rf"reliq ({names}) (.+)", text):
        words = shlex.shlex(found[2], posix=True, punctuation_chars="`;")
        words.whitespace_split, words.commenters = True, ""
        yield found[1].split(), list(itertools.takewhile(lambda word: word[0] not in "`;", iter(words.get_token, None)))


def parsed(command, words):
    """Return the parameters that a command parses from its words."""
    found = Commands.load(command[0])
    for name in command[1:]:
        found = found.commands[name]
    return found.make_context(" ".join(command), words, resilient_parsing=True).params


@pytest.fixture
def named(url, client):
    """Make a queue with this name and layout, with limits, a sleeping key, and shards for the commands to show."""

    def make(name, layout):
        Queue("other", bytes, url=url, layout=layout).publish(b"x")
        queue = Queue(name, bytes, url=url, layout=layout)
        queue.publish(b"x")
        client.hset(queue.keys.cron, f"{ENTRY} schedule", "every 60")
        if not layout.bare:
            client.hset(queue.keys.limits, mapping={"on": "1", "weight:k": "nonsense"})
            client.zadd(queue.keys.asleep, {"": time.time() + 9999})
            client.set(queue.keys.map, ShardMap(3, 8, 1, "growing").text)
        queue.close()

    return make


@pytest.mark.parametrize(
    ("name", "layout"), [(one, of) for of in LAYOUTS for one in NAMES if is_name(one, of)], ids=str
)
def test_commands_that_an_output_suggests_quote_a_hostile_name(name, layout, command, named):
    named(name, layout)
    seen = set()
    for words in NAMING:
        at = 2 if words[0] == "cron" else 1
        of = ["--layout", layout] if "--layout" in options(" ".join(words[:at])) else []
        done = command(*words[:at], *of, *(word.replace("QUEUE", name) for word in words[at:]))
        for what, rest in named_commands(done.out + done.err):
            given = parsed(what, rest)
            seen.add(" ".join(what))
            if given.get("cron"):
                assert given["cron"] == ENTRY, done
            if given.get("queue", name) != "QUEUE":
                assert given.get("queue", name) == name, done
                assert given.get("layout", "reliq") == str(layout) or "queue" not in given, done

    assert seen >= {"resume", "redrive", "delete"}
    assert layout.bare or seen >= {"limits", "shards"}
