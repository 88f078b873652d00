"""What is not allowed is refused by name, and before anything is written."""

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest

from reliq import Admin, BodyError, ConfigurationError, Layout, Letter, Outgoing, Queue, WrongKeyTypeError
from reliq.message import BARE

FAR = datetime.now(UTC) + timedelta(days=4000)
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001  what is refused
LETTER = Letter("1-0", "a", "failed", "", 1, 0.0, BARE, b"{}")

PUBLISHES = [
    ({"delay": -1}, "delay must be 0 to 315360000 seconds, not -1"),
    ({"delay": math.nan}, "delay must be seconds or a timedelta, not nan"),
    ({"delay": math.inf}, "delay must be 0 to 315360000 seconds, not inf"),
    ({"delay": True}, "delay must be seconds or a timedelta, not True"),
    ({"delay": "5"}, "delay must be seconds or a timedelta, not a str"),
    ({"delay": timedelta(days=-1)}, "delay must be 0 to 315360000 seconds, not -86400.0"),
    ({"ttl": 0}, "ttl must be 0.001 to 315360000 seconds, not 0"),
    ({"ttl": -5}, "ttl must be 0.001 to 315360000 seconds, not -5"),
    ({"ttl": math.nan}, "ttl must be seconds or a timedelta, not nan"),
    ({"retries": -1}, "retries must be 0 to 1000, not -1"),
    ({"retries": 1001}, "retries must be 0 to 1000, not 1001"),
    ({"retries": 1.5}, "retries must be a whole number, not 1.5"),
    ({"retries": True}, "retries must be a whole number, not True"),
    ({"id": ""}, "id must be 1 to 128 of A-Z a-z 0-9 _ . : - , not ''"),
    ({"id": "a b"}, "id must be 1 to 128 of A-Z a-z 0-9 _ . : - , not 'a b'"),
    ({"id": "a", "dedup": -1}, "dedup must be 0 to 315360000 seconds, not -1"),
    ({"dedup": 5}, "dedup needs an id chosen by you"),
    ({"headers": {"a b": "x"}}, "a header's name must be 1 to 64"),
    ({"headers": {"a": 5}}, "header 'a' must be a str, not int"),
    ({"headers": {"a": "x" * 9000}}, "headers must be at most 8192 bytes"),
    ({"at": NAIVE}, "at must be an aware datetime"),
    ({"at": 5}, "at must be an aware datetime"),
    ({"at": FAR}, "at must lie between 1970 and ten years from now"),
    ({"at": datetime(1900, 1, 1, tzinfo=UTC)}, "at must lie between 1970 and ten years from now"),
    ({"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))}, "at must lie between 1970"),
    ({"at": datetime.now(UTC), "delay": 5}, "give delay or at, not both"),
]

OTHERS = {
    "cancel": [(("a b",), {}, "id must be"), ((None,), {}, "id must be")],
    "reschedule": [
        (("a b",), {}, "id must be"),
        (("a",), {"delay": -1}, "delay must be 0 to"),
        (("a",), {"at": NAIVE}, "at must be an aware datetime"),
        (("a",), {"at": datetime.now(UTC), "delay": 5}, "give delay or at, not both"),
    ],
    "publish_many": [
        (([],), {"chunk": 0}, "chunk must be 1 to 500, not 0"),
        (([],), {"chunk": 501}, "chunk must be 1 to 500, not 501"),
        (([],), {"max_backlog": 0}, "max_backlog must be 1 to 1000000000, not 0"),
        (([Outgoing(body={}, delay=-1)],), {}, "delay must be 0 to"),
        (([{}, Outgoing(body={}, retries=-1)],), {}, "retries must be 0 to"),
        ((5,), {}, "items must be an iterable of bodies or Outgoing, not int"),
        (("text",), {}, "items must be an iterable of bodies or Outgoing, not str"),
        (({"a": 1},), {}, "items must be an iterable of bodies or Outgoing, not dict"),
        ((Outgoing(body={}),), {}, "items must be an iterable of bodies or Outgoing, not Outgoing"),
    ],
    "pause": [
        ((), {"for_": 0}, "for_ must be 0.001 to"),
        ((), {"reason": "a\nb"}, "reason must be one line of at most 200 characters"),
        ((), {"reason": "a" * 201}, "reason must be one line of at most 200 characters"),
        ((), {"reason": 5}, "reason must be one line of at most 200 characters"),
    ],
    "letters": [
        ((), {"limit": 0}, "limit must be 1 to 500, not 0"),
        ((), {"limit": 501}, "limit must be 1 to 500, not 501"),
        ((), {"after": "x"}, "after must be the `letter` of a dead letter"),
        ((), {"after": None}, "after must be the `letter` of a dead letter"),
    ],
    "redrive": [
        ((["1-0"],), {}, "letters must be a list of dead letters"),
        ((LETTER,), {}, "letters must be a list of dead letters"),
        ((None,), {}, "letters must be a list of dead letters, as `letters()` returns them, not NoneType"),
        ((iter([LETTER]),), {}, "letters must be a list of dead letters"),
        (([LETTER] * 501,), {}, "number of letters must be 0 to 500, not 501"),
        (([LETTER],), {"delay": -1}, "delay must be 0 to"),
    ],
}
ROWS = [(name, *row) for name, rows in OTHERS.items() for row in rows]


@pytest.mark.parametrize(("options", "said"), PUBLISHES, ids=range(len(PUBLISHES)))
def test_a_publish_option_is_refused_before_redis_is_asked(queue, call, commands, options, said):
    with pytest.raises(ConfigurationError) as caught:
        call(queue, "publish", {"a": 1}, **options)

    assert str(caught.value).startswith(said)
    assert commands() == {}


@pytest.mark.parametrize(("name", "args", "options", "said"), ROWS, ids=range(len(ROWS)))
def test_an_argument_is_refused_before_redis_is_asked(queue, call, commands, name, args, options, said):
    with pytest.raises(ConfigurationError) as caught:
        call(queue, name, *args, **options)

    assert str(caught.value).startswith(said)
    assert commands() == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 0}, "limit must be 1 to 500, not 0"),
        ({"limit": True}, "limit must be a whole number, not True"),
        ({"wait": -1}, "wait must be 0 to"),
        ({"lease": 0}, "lease must be 0.05 to 86400 seconds, not 0"),
        ({"lease": 86_401}, "lease must be 0.05 to 86400 seconds, not 86401"),
    ],
)
def test_what_receive_is_given_is_refused_before_redis_is_asked(queue, commands, options, said):
    with pytest.raises(ConfigurationError, match=f"^{said}"), queue.receive(**options):
        pass

    assert commands() == {}


@pytest.mark.parametrize("answer", [{"delay": -1}, {"delay": math.nan}, {"delay": "5"}], ids=str)
def test_an_answer_that_is_not_allowed_is_refused_where_it_is_given(queue, answer):
    queue.publish({})

    with queue.receive() as [job]:
        with pytest.raises(ConfigurationError, match="^delay must be "):
            job.nack(**answer)
        with pytest.raises(ConfigurationError, match="^delay must be "):
            job.snooze(**answer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a:b"}, "queue name must be 1 to 128"),
        ({"name": "a{b}"}, "queue name must be 1 to 128"),
        ({"body": 5}, "body type 5 cannot be read from JSON"),
        ({"retries": -1}, "retries must be 0 to 1000, not -1"),
        ({"ttl": 0}, "ttl must be 0.001 to"),
        ({"max_body": 0}, "max_body must be 1 to 16777216, not 0"),
        ({"max_body": 17 * 2**20}, "max_body must be 1 to 16777216"),
        ({"dedup": -1}, "dedup must be 0 to"),
        ({"letters_max": -1}, "letters_max must be 0 to"),
        ({"letters_ttl": 0}, "letters_ttl must be 1 to"),
        ({"url": "http://host"}, "Redis URL must begin with redis://"),
        ({"url": 5}, "url must be a Redis URL or a redis-py client, not int"),
        ({"url": ""}, "Redis URL must begin with redis://"),
    ],
    ids=str,
)
def test_a_queue_is_refused_when_it_is_made(options, said):
    with pytest.raises(ConfigurationError) as caught:
        Queue(**{"name": "q", **options})

    assert str(caught.value).startswith(said)


def test_without_a_url_nothing_is_guessed(monkeypatch):
    monkeypatch.delenv("RELIQ_URL", raising=False)

    with pytest.raises(ConfigurationError, match="no Redis given: pass url=.*or set RELIQ_URL"):
        Queue("q").publish({})


@pytest.mark.parametrize("body", [[1], "text", 5, None, object()], ids=lambda body: type(body).__name__)
def test_a_body_of_another_type_is_refused_before_redis_is_asked(queue, call, commands, body):
    with pytest.raises(BodyError, match="body must be dict, not "):
        call(queue, "publish", body)

    assert commands() == {}


@pytest.mark.parametrize(
    "body", [{"a": object()}, {"a": math.nan}, {"a": "\udc80"}], ids=["object", "nan", "surrogate"]
)
def test_a_body_that_cannot_be_encoded_is_refused_before_redis_is_asked(queue, call, commands, body):
    with pytest.raises(BodyError, match="cannot be encoded"):
        call(queue, "publish", body)

    assert commands() == {}


def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not(url, call, commands):
    small = Queue("q", bytes, max_body=100, url=url)

    with pytest.raises(BodyError, match=r"body must be at most 100 bytes \(max_body\), not 101"):
        call(small, "publish", b"x" * 101)
    assert commands() == {}
    assert call(small, "publish", b"x" * 100).status == "published"
    small.close()


def test_by_default_a_body_may_have_a_mebibyte(url):
    with pytest.raises(BodyError, match="at most 1048576 bytes"):
        Queue("q", bytes, url=url).publish(b"x" * (2**20 + 1))


def test_on_the_go_layout_nothing_is_sent_that_go_could_not_read(url, commands):
    bare = Queue("q", bytes, url=url, layout=Layout.hdt3213())

    with pytest.raises(BodyError, match="must not begin with 'RELIQ/1 '"):
        bare.publish(b"RELIQ/1 {}\n")
    with pytest.raises(ConfigurationError, match="headers cannot be sent"):
        bare.publish(b"x", headers={"a": "b"})
    assert commands() == {}


def test_a_bad_item_leaves_what_went_before_published(queue, call):
    items = [{"n": 1}, {"n": 2}, {"n": math.nan}, {"n": 4}]

    with pytest.raises(BodyError):
        call(queue, "publish_many", items, chunk=2)

    assert queue.counts().ready == 2


WRONG = {
    "pending": lambda client, key: client.set(key, "x"),
    "ready": lambda client, key: client.set(key, "x"),
    "unack": lambda client, key: client.set(key, "x"),
    "retry": lambda client, key: client.set(key, "x"),
    "garbage": lambda client, key: client.set(key, "x"),
    "retries_left": lambda client, key: client.set(key, "x"),
    "lease": lambda client, key: client.set(key, "x"),
    "dead": lambda client, key: client.set(key, "x"),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_key_of_the_wrong_type_is_named_and_nothing_written(queue, call, client, part):
    key = getattr(queue.keys, part)
    WRONG[part](client, key)
    name = {"dead": "letters", "retry": "counts", "unack": "counts"}.get(part, "publish")
    options = (
        {"pending": {"delay": 1}, "ready": {}, "retries_left": {}}.get(part, {"id": "x"}) if name == "publish" else {}
    )

    with pytest.raises(Exception, match=key) as caught:
        call(queue, name, *([{}] if name == "publish" else []), **options)

    found = caught.value if isinstance(caught.value, WrongKeyTypeError) else caught.value.__cause__
    assert isinstance(found, WrongKeyTypeError)
    assert found.key == key
    assert client.keys() == [key.encode()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"layout": "hdt3213"},
            r"layout must be Layout.RELIQ, Layout.hdt3213\(\) or Layout.parse\(TEXT\), not 'hdt3213'",
        ),
        ({"layout": None}, "layout must be .*, not 'None'"),
        ({"validate": "x"}, "validate must be True or False, not 'x'"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(url, options, said):
    with pytest.raises(ConfigurationError, match=said):
        Queue("x", int, url=url, **options)


def test_an_admin_of_a_text_instead_of_a_layout_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"Layout.parse\(TEXT\), not 'hdt3213'"):
        Admin(url, layout="hdt3213")
