"""
Invalid arguments are rejected, with the argument's name, before anything is written.

tests/unit has the invalid values of each check, tests/security/test_entries.py an invalid argument of each call.
"""

import asyncio
import math
from datetime import UTC, datetime

import pytest

from reliq import Admin, BodyError, ConfigurationError, Layout, OutgoingMessage, Queue, WrongKeyTypeError

#: Call -> the beginning of the error, and the function. Blocking calls are listed only if
#: tests/security/test_entries.py does not test them.
CALLS = {
    "apublish": ("delay must be", lambda queue: queue.apublish({}, delay=-1)),
    "apublish_many items": ("items must be", lambda queue: queue.apublish_many("text")),
    "apublish_many chunk": ("chunk must be", lambda queue: queue.apublish_many([], chunk=501)),
    "acancel": ("id must be", lambda queue: queue.acancel("a b")),
    "acancel tombstone": ("tombstone must be", lambda queue: queue.acancel("a", tombstone=0)),
    "areschedule id": ("id must be", lambda queue: queue.areschedule("a b")),
    "areschedule delay": ("delay must be", lambda queue: queue.areschedule("a", delay=-1)),
    "apause": ("reason must be", lambda queue: queue.apause(reason="a\nb")),
    "aletters": ("limit must be", lambda queue: queue.adead_letters(limit=501)),
    "aredrive": ("letters must be", lambda queue: queue.aredrive(["1-0"])),
    "areceive limit": ("limit must be", lambda queue: queue.areceive(limit=501).__aenter__()),
    "areceive wait": ("wait must be", lambda queue: queue.areceive(wait=-1).__aenter__()),
    "cancel": ("tombstone must be", lambda queue: queue.cancel("a", tombstone=0)),
    "reschedule": ("give delay or at,", lambda queue: queue.reschedule("a", delay=5, at=datetime.now(UTC))),
    "publish": ("give delay or at,", lambda queue: queue.publish({}, delay=5, at=datetime.now(UTC))),
    "publish dedup": ("dedup needs an id chosen by you", lambda queue: queue.publish({}, dedup=5)),
    "publish_many max_backlog": ("max_backlog must be", lambda queue: queue.publish_many([], max_backlog=0)),
    "publish_many item": (
        "retries must be",
        lambda queue: queue.publish_many([{}, OutgoingMessage(body={}, retries=-1)]),
    ),
    "publish_many one OutgoingMessage": (
        "items must be an iterable",
        lambda queue: queue.publish_many(OutgoingMessage(body={})),
    ),
    "publish_many one body": ("items must be an iterable", lambda queue: queue.publish_many({"a": 1})),
    "redrive iterator": ("letters must be a list of dead letters,", lambda queue: queue.redrive(iter([]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_argument_is_refused_before_redis_is_asked(queue, commands, name):
    said, begin = CALLS[name]

    async def call():
        await begin(queue)

    with pytest.raises(ConfigurationError, match=f"^{said} ?"):
        asyncio.run(call())

    assert commands() == {}


def test_bad_delay_of_an_answer_is_refused_where_it_is_given(queue):
    queue.publish({})

    with queue.receive() as [job]:
        for answer in (job.nack, job.snooze):
            with pytest.raises(ConfigurationError, match="^delay must be "):
                answer(delay=-1)


def test_queue_without_a_url_refuses_to_publish(monkeypatch):
    monkeypatch.delenv("RELIQ_URL", raising=False)

    with pytest.raises(ConfigurationError, match="no Redis given: pass url=.*or set RELIQ_URL"):
        Queue("q").publish({})


def test_bad_body_is_refused_before_redis_is_asked(queue, call, commands):
    for body, said in (([1], "body must be dict, not "), ({"a": math.nan}, "cannot be encoded")):
        with pytest.raises(BodyError, match=said):
            call(queue, "publish", body)

    assert commands() == {}


def test_body_of_max_body_is_accepted_and_a_larger_body_refused(make_queue, commands):
    small = make_queue(bytes, max_body=100)

    with pytest.raises(BodyError, match=r"body must be at most 100 bytes \(max_body\), not 101"):
        small.publish(b"x" * 101)
    assert commands() == {}
    assert small.publish(b"x" * 100).status == "published"


def test_queue_in_the_go_layout_writes_bare_bodies_and_refuses_what_go_cannot_read(make_queue, commands, client):
    bare = make_queue(bytes, layout=Layout.hdt3213())

    with pytest.raises(BodyError, match="must not begin with 'RELIQ/1 '"):
        bare.publish(b"RELIQ/1 {}\n")
    with pytest.raises(ConfigurationError, match="headers cannot be sent"):
        bare.publish(b"x", headers={"a": "b"})
    assert commands() == {}
    assert client.get(f"dp:q:msg:{bare.publish(b'hello').id}") == b"hello"


#: Part of the queue -> the call that finds a key of the wrong type there.
WRONG_TYPES = {
    "ready": ("publish", {}),
    "lease": ("publish", {"id": "x"}),
    "unack": ("counts", {}),
    "dead": ("dead_letters", {}),
}


@pytest.mark.parametrize("part", WRONG_TYPES)
def test_redis_key_of_the_wrong_type_is_named_and_nothing_written(queue, call, client, part):
    name, options = WRONG_TYPES[part]
    key = getattr(queue.keys, part)
    client.set(key, "x")

    with pytest.raises(Exception, match=key) as caught:
        call(queue, name, *([{}] if name == "publish" else []), **options)

    found = caught.value if isinstance(caught.value, WrongKeyTypeError) else caught.value.__cause__
    assert isinstance(found, WrongKeyTypeError)
    assert found.key == key
    assert client.keys() == [key.encode()]


def test_option_of_another_type_is_refused_by_name(url):
    for make, said in (
        (
            lambda: Queue("x", int, url=url, layout="hdt3213"),
            r"layout must be .* or Layout.parse\(TEXT\), not 'hdt3213'",
        ),
        (lambda: Queue("x", int, url=url, validate="x"), "validate must be True or False, not 'x'"),
        (lambda: Admin(url, layout="hdt3213"), "layout must be .*, not 'hdt3213'"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            make()
