"""Every entrance refuses what it cannot take: before anything is sent, with an error of ours, by the field's name."""

import asyncio
import math
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from reliq import (
    Admin,
    BodyError,
    ConfigurationError,
    Consumer,
    Durability,
    Layout,
    Letter,
    Outgoing,
    Queue,
    UndecodableError,
    WorkerSettings,
)
from reliq.message import BARE
from reliq.transport.connection import Connection

SECRET = "s3cret"
NOBODY = f"redis://:{SECRET}@127.0.0.1:1/0"
QUEUE = Queue("q", url=NOBODY)
TEXTS = Queue("q", str, url=NOBODY)
BYTES = Queue("q", bytes, url=NOBODY)
ADMIN = Admin(NOBODY)
OTHERS_LETTER = Letter("1-0", "a", "failed", "", 1, 0.0, BARE, SECRET.encode())

NO_IDS = ["", "a b", "a\n", "a\0", "a*", "ä", "a/b", "a" * 129, "{a}", 5, b"a", None]
NO_NAMES = ["", "a:b", "a b", "a\n", "{a}", "a" * 129, "ä", 5, b"a", None]
NO_DURATIONS = [True, math.nan, math.inf, -1, timedelta(days=-1), timedelta(days=4000), 10**30, "5", b"5"]
NO_COUNTS = [True, -1, 1.5, "5", 10**30, None]
NO_HEADERS = [
    {"a b": "x"},
    {"": "x"},
    {"a" * 65: "x"},
    {5: "x"},
    {"a": 5},
    {"a": SECRET * 2000},
    {"a": "\udc80"},
    ["a"],
]
FAR = datetime.now(UTC) + timedelta(days=4000)
NO_TIMES = [datetime(2026, 1, 1), FAR, datetime(1900, 1, 1, tzinfo=UTC), 5, "now"]  # noqa: DTZ001  what is refused


def receive(**options):
    with QUEUE.receive(**options):
        pass


def handler(**options):
    Consumer(NOBODY).handler(QUEUE, **options)


#: What is called with each value, the beginning of what is said, and the values.
TABLE = [
    (Queue, "queue name must be", NO_NAMES),
    (lambda name: Admin(NOBODY).redis_keys(name), "queue name must be", NO_NAMES),
    (lambda name: QUEUE.publish({}, id=name), "id must be", [one for one in NO_IDS if one is not None]),
    (lambda name: QUEUE.publish_many([Outgoing(body={}, id=name)]), "id must be", NO_IDS[:-1]),
    (QUEUE.cancel, "id must be", NO_IDS),
    (QUEUE.reschedule, "id must be", NO_IDS),
    (QUEUE.publish, "body must be dict", [SECRET, b"x", 5, None, [1], object()]),
    (TEXTS.publish, "body ", [b"x", 5, None, "\udc80" + SECRET]),
    (BYTES.publish, "body ", [SECRET, 5, None, SECRET.encode() * 300_000]),
    (
        QUEUE.publish,
        "body of type dict cannot",
        [{"a": math.nan}, {"a": object()}, {SECRET: "\udc80"}],
    ),
    (lambda delay: QUEUE.publish({}, delay=delay), "delay must be", NO_DURATIONS),
    (lambda at: QUEUE.publish({}, at=at), "at must ", NO_TIMES),
    (lambda ttl: QUEUE.publish({}, ttl=ttl), "ttl must be", [0, 0.0009, *NO_DURATIONS]),
    (lambda dedup: QUEUE.publish({}, id="a", dedup=dedup), "dedup must be", NO_DURATIONS),
    (lambda retries: QUEUE.publish({}, retries=retries), "retries must be", [1001, *NO_COUNTS[:-1]]),
    (lambda headers: QUEUE.publish({}, headers=headers), ("header", "a header's name"), NO_HEADERS),
    (lambda given: QUEUE.publish({}, durability=given), "durability must be", ["all", 1, True, Durability]),
    (Durability.replicas, "replicas must be", [0, 101, *NO_COUNTS]),
    (lambda timeout: Durability.replicas(1, timeout), "timeout must be", [0, 61, *NO_DURATIONS]),
    (lambda timeout: Durability.aof(timeout=timeout), "timeout must be", [0, 61, *NO_DURATIONS]),
    (lambda chunk: QUEUE.publish_many([], chunk=chunk), "chunk must be", [0, 501, *NO_COUNTS]),
    (QUEUE.publish_many, "items must be", [SECRET, b"x", {"a": 1}, 5, None, Outgoing(body={})]),
    (lambda limit: receive(limit=limit), "limit must be", [0, 501, *NO_COUNTS]),
    (lambda lease: receive(lease=lease), "lease must be", [0, 86_401, *NO_DURATIONS]),
    (lambda wait: receive(wait=wait), "wait must be", NO_DURATIONS),
    (lambda limit: QUEUE.letters(limit=limit), "limit must be", [0, 501, *NO_COUNTS]),
    (lambda after: QUEUE.letters(after=after), "after must be", [SECRET, "1-0\n", None, 5]),
    (
        QUEUE.redrive,
        ("letters must be", "number of letters"),
        [OTHERS_LETTER, [SECRET], [None]],
    ),
    (QUEUE.redrive, "number of letters must be", [[OTHERS_LETTER] * 501]),
    (lambda delay: QUEUE.redrive([OTHERS_LETTER], delay=delay), "delay must be", NO_DURATIONS),
    (lambda reason: QUEUE.pause(reason=reason), "reason must be", ["a\nb", "a" * 201, 5, None]),
    (lambda for_: QUEUE.pause(for_=for_), "for_ must be", [0, *NO_DURATIONS]),
    (lambda value: Queue("q", retries=value), "retries must be", [1001, *NO_COUNTS]),
    (lambda value: Queue("q", ttl=value), "ttl must be", [0, *NO_DURATIONS]),
    (lambda value: Queue("q", max_body=value), "max_body must be", [0, 16 * 2**20 + 1, *NO_COUNTS]),
    (lambda value: Queue("q", letters_max=value), "letters_max must be", NO_COUNTS),
    (lambda value: Queue("q", letters_ttl=value), "letters_ttl must be", [0, *NO_DURATIONS]),
    (lambda value: Queue("q", value), "body type ", [5, object()]),
    (lambda value: handler(lease=value), "lease must be", [0, 86_401, *NO_DURATIONS]),
    (lambda value: handler(timeout=value), "timeout must be", [0, *NO_DURATIONS]),
    (lambda value: handler(concurrency=value), "concurrency must be", [0, 10_001, *NO_COUNTS[:-1]]),
    (lambda value: WorkerSettings(concurrency=value), "concurrency must be", [0, 10_001, *NO_COUNTS]),
    (lambda value: WorkerSettings(grace=value), "grace must be", NO_DURATIONS),
    (lambda url: Queue("q", url=url), "Redis URL ", ["", SECRET, f"http://:{SECRET}@h", f"redis://:{SECRET}@h/x"]),
    (
        lambda url: Queue("q", url=url),
        "Redis URL ",
        [f"redis://h?{name}=1" for name in ("dbb", "retry", "host", "path")],
    ),
    (lambda url: Queue("q", url=url), "url must be", [5, b"redis://h", object()]),
    (ADMIN.account, "queue name must be", NO_NAMES),
    (ADMIN.running, "queue name must be", NO_NAMES),
    (ADMIN.ends, "queue name must be", NO_NAMES),
    (lambda name: ADMIN.show(name, "a"), "queue name must be", NO_NAMES),
    (lambda name: ADMIN.queues([name]), "queue name must be", NO_NAMES),
    (lambda name: ADMIN.watch([name]), "queue name must be", NO_NAMES),
    (lambda value: ADMIN.queues(interval=value), "interval must be", [61, *NO_DURATIONS]),
    (lambda value: ADMIN.running("q", longer_than=value), "longer_than must be", NO_DURATIONS),
    (lambda value: ADMIN.ends("q", limit=value), "limit must be", [0, 100_001, *NO_COUNTS]),
    (lambda value: ADMIN.ends("q", kind=value), "kind must be one of", ["gone", "", 5]),
    (Admin, ("Redis URL ", "url must be"), ["", f"me:{SECRET}@h", 5]),
]
ROWS = [
    pytest.param(enter, said, value, id=f"{number}-{at}")
    for number, (enter, said, values) in enumerate(TABLE)
    for at, value in enumerate(values)
]


@pytest.fixture
def nobody_connects(monkeypatch):
    """Fail as soon as anybody wants a connection."""

    def refuse(*_, **__):
        pytest.fail("something was sent before it was checked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", refuse)


@pytest.mark.parametrize(("enter", "said", "value"), ROWS)
def test_it_is_refused_by_name_and_nothing_secret_is_shown(nobody_connects, enter, said, value):
    with pytest.raises((ConfigurationError, BodyError)) as caught:
        enter(value)

    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) < 600
    if not (isinstance(value, str) and "letter" in str(caught.value)):
        assert SECRET not in str(caught.value)


def test_a_body_in_the_clothes_of_an_envelope_is_refused_where_it_would_be_taken_for_one(nobody_connects):
    bare = Queue("q", bytes, url=NOBODY, layout=Layout.hdt3213())

    with pytest.raises(BodyError, match="must not begin with 'RELIQ/1 '"):
        bare.publish(b"RELIQ/1 " + SECRET.encode())


def test_an_undecodable_body_is_told_by_path_and_type_alone():
    with pytest.raises(UndecodableError) as caught:
        Queue("q", dict[str, int]).codec.decode(b'{"a":"%s"}' % SECRET.encode())

    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "shown", [repr, str, lambda queue: queue.connection().name, lambda queue: repr(queue.connection())]
)
def test_a_url_with_a_password_is_shown_without(shown):
    assert SECRET not in shown(QUEUE)
    assert SECRET not in repr(Connection.to(NOBODY).__dict__.get("_wires"))


COMMANDS = [
    (["worker", "no_such_module:consumer"], "cannot import 'no_such_module'"),
    (["worker", "os:path"], "must have a Consumer named 'path'"),
    (["worker", "x", "--processes", "0"], "--processes must be 1 to 1000, not 0"),
    (["worker", "x", "--grace", "nan"], "grace must be seconds"),
    (["exporter", "--url", f"redis://:{SECRET}@host/zero"], "Redis URL must end in a database number"),
    (
        ["exporter", "--url", f"rediss://:{SECRET}@host?ssl_cert_reqs=none"],
        "Redis URL would take anybody's certificate",
    ),
    (["exporter", "--url", NOBODY, "--port", "70000"], "metrics port must be 0 to 65535, not 70000"),
]


@pytest.mark.parametrize(("arguments", "said"), COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_that_is_asked_for_wrongly_says_so_in_a_line_and_exits_2(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "reliq", *arguments],
        env={**os.environ, "RELIQ_URL": NOBODY},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert said in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
