"""Each call rejects an invalid argument before it sends anything; the error contains its name and no secret."""

import asyncio
import math
import os
import socket
import subprocess
import sys
import threading
from datetime import datetime

import pytest

from reliq import (
    Admin,
    BodyError,
    ConfigurationError,
    Consumer,
    DeadLetter,
    Durability,
    OutgoingMessage,
    Queue,
    UndecodableError,
    WorkerSettings,
)
from reliq.admin import Filter
from reliq.message import BARE

SECRET = "s3cret"
NOBODY = f"redis://:{SECRET}@127.0.0.1:1/0"
QUEUE = Queue("q", url=NOBODY)
TEXTS = Queue("q", str, url=NOBODY)
BYTES = Queue("q", bytes, url=NOBODY)
ADMIN = Admin(NOBODY)
OTHERS_LETTER = DeadLetter("1-0", "a", "failed", "", 1, 0.0, BARE, SECRET.encode())


def receive(**options):
    with QUEUE.receive(**options):
        pass


def handler(**options):
    Consumer(NOBODY).handler(QUEUE, **options)


#: Call -> the beginning of the error, and a function that makes the call. tests/unit has all invalid values.
BAD_CALLS = {
    "Queue name": ("queue name must be", lambda: Queue("a:b")),
    "Queue body": ("body type ", lambda: Queue("q", 5)),
    "Queue retries": ("retries must be", lambda: Queue("q", retries=1001)),
    "Queue ttl": ("ttl must be", lambda: Queue("q", ttl=0)),
    "Queue max_body": ("max_body must be", lambda: Queue("q", max_body=0)),
    "Queue dead_letter_limit": ("dead_letter_limit must be", lambda: Queue("q", dead_letter_limit=-1)),
    "Queue dead_letter_ttl": ("dead_letter_ttl must be", lambda: Queue("q", dead_letter_ttl=0)),
    "Queue durability": ("durability must be", lambda: Queue("q", durability="always")),
    "Queue url": ("Redis URL ", lambda: Queue("q", url=f"http://:{SECRET}@h")),
    "Queue url of another type": ("url must be", lambda: Queue("q", url=5)),
    "publish id": ("id must be", lambda: QUEUE.publish({}, id="a b")),
    "publish body": ("body must be dict", lambda: QUEUE.publish(SECRET)),
    "publish text": ("body ", lambda: TEXTS.publish("\udc80" + SECRET)),
    "publish large bytes": ("body ", lambda: BYTES.publish(SECRET.encode() * 300_000)),
    "publish body that JSON cannot hold": ("body of type dict cannot", lambda: QUEUE.publish({SECRET: "\udc80"})),
    "publish delay": ("delay must be", lambda: QUEUE.publish({}, delay=math.nan)),
    "publish at": ("at must ", lambda: QUEUE.publish({}, at=datetime(2026, 1, 1))),  # noqa: DTZ001  it is refused
    "publish ttl": ("ttl must be", lambda: QUEUE.publish({}, ttl=0)),
    "publish dedup": ("dedup must be", lambda: QUEUE.publish({}, id="a", dedup=-1)),
    "publish retries": ("retries must be", lambda: QUEUE.publish({}, retries=1001)),
    "publish headers": ("header", lambda: QUEUE.publish({}, headers={"a": SECRET * 2000})),
    "publish durability": ("durability must be", lambda: QUEUE.publish({}, durability=True)),
    "publish_many items": ("items must be", lambda: QUEUE.publish_many(SECRET)),
    "publish_many id": ("id must be", lambda: QUEUE.publish_many([OutgoingMessage(body={}, id="a b")])),
    "publish_many chunk": ("chunk must be", lambda: QUEUE.publish_many([], chunk=501)),
    "publish_many durability": ("durability must be", lambda: QUEUE.publish_many([], durability=1)),
    "cancel id": ("id must be", lambda: QUEUE.cancel("a b")),
    "reschedule id": ("id must be", lambda: QUEUE.reschedule("a b")),
    "receive limit": ("limit must be", lambda: receive(limit=501)),
    "receive lease": ("lease must be", lambda: receive(lease=86_401)),
    "receive wait": ("wait must be", lambda: receive(wait=-1)),
    "letters limit": ("limit must be", lambda: QUEUE.dead_letters(limit=0)),
    "letters after": ("after must be", lambda: QUEUE.dead_letters(after=SECRET)),
    "redrive letter": ("letters must be", lambda: QUEUE.redrive([SECRET])),
    "redrive letters": ("number of letters must be", lambda: QUEUE.redrive([OTHERS_LETTER] * 501)),
    "redrive delay": ("delay must be", lambda: QUEUE.redrive([OTHERS_LETTER], delay=-1)),
    "pause reason": ("reason must be", lambda: QUEUE.pause(reason="a\nb")),
    "pause for_": ("for_ must be", lambda: QUEUE.pause(for_=0)),
    "handler lease": ("lease must be", lambda: handler(lease=0)),
    "handler timeout": ("timeout must be", lambda: handler(timeout=0)),
    "handler concurrency": ("concurrency must be", lambda: handler(concurrency=0)),
    "WorkerSettings concurrency": ("concurrency must be", lambda: WorkerSettings(concurrency=0)),
    "WorkerSettings grace": ("grace must be", lambda: WorkerSettings(grace=-1)),
    "Durability.replicas": ("replicas must be", lambda: Durability.replicas(0)),
    "Durability.replicas timeout": ("timeout must be", lambda: Durability.replicas(1, 61)),
    "Durability.aof timeout": ("timeout must be", lambda: Durability.aof(timeout=0)),
    "Admin url": ("Redis URL ", lambda: Admin(f"me:{SECRET}@h")),
    "Admin.redis_keys": ("queue name must be", lambda: ADMIN.redis_keys("a:b")),
    "Admin.account": ("queue name must be", lambda: ADMIN.account("a:b")),
    "Admin.show": ("queue name must be", lambda: ADMIN.show("a:b", "a")),
    "Admin.watch": ("queue name must be", lambda: ADMIN.watch(["a:b"])),
    "Admin.queues": ("queue name must be", lambda: ADMIN.queues(["a:b"])),
    "Admin.running": ("queue name must be", lambda: ADMIN.running("a:b")),
    "Admin.running longer_than": ("longer_than must be", lambda: ADMIN.running("q", longer_than=-1)),
    "Admin.messages": ("queue name must be", lambda: ADMIN.messages("a:b", "ended")),
    "Admin.messages state": ("state must be", lambda: ADMIN.messages("q", "gone")),
    "Filter kind": ("kind must be one of", lambda: Filter(kind="gone")),
}


def test_bad_argument_is_refused_before_anything_is_sent(monkeypatch):
    for thread in threading.enumerate():  # of an earlier test: it may connect once more
        if thread.name.startswith("reliq-ping"):
            thread.join(60)

    def refuse(*_, **__):
        pytest.fail("something was sent before it was checked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", refuse)
    errors = {name: error_of(call) for name, (_, call) in BAD_CALLS.items()}

    assert {name: errors[name] for name, (said, _) in BAD_CALLS.items() if not errors[name].startswith(said)} == {}
    assert [name for name, error in errors.items() if SECRET in error] == []


def error_of(call):
    try:
        call()
    except (ConfigurationError, BodyError) as error:
        return str(error)
    return "it was not refused"


def test_errors_and_representations_show_no_secret():
    with pytest.raises(UndecodableError) as caught:
        Queue("q", dict[str, int]).codec.decode(b'{"a":"%s"}' % SECRET.encode())
    connection = QUEUE.connection()
    shown = [caught.value, QUEUE, connection, connection.name, vars(connection)["_blocking"]]

    assert [one for one in shown if SECRET in f"{one}{one!r}"] == []


BAD_COMMANDS = {
    "a module without a consumer": (["worker", "os:path"], "must have a Consumer named 'path'"),
    "a setting": (["worker", "x", "--grace", "nan"], "grace must be seconds"),
    "a URL": (["exporter", "--url", f"redis://:{SECRET}@host/zero"], "Redis URL must end in a database number"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_command_with_a_bad_option_ends_in_one_line_and_exit_code_2(arguments, said):
    environment = {**os.environ, "RELIQ_URL": NOBODY}
    command = [sys.executable, "-m", "reliq", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert SECRET not in done.stderr
