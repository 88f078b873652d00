"""The reference pages list exactly the names in the code; a message can be read with the page's description alone."""

import inspect
import re

import msgspec
from pages import ROOT, blocks, rows

from reliq import Consumer, OutgoingMessage, Queue, Reject, keys as spelled
from reliq.admin.screens import account
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys
from reliq.message import Counts, Header
from reliq.metrics.names import ALL
from reliq.wire_format import Backoff, Delayed, Held, StateWord, Suspect, Unset, open_envelope

REDIS_KEYS = "reference/redis-keys.md"
#: Placeholders in the table of Redis keys, and the texts that they match.
HOLES = {"NAME": "NAME", "KEY": ".+", "ID": "[^:]+", "LANE": "[^:]+", "MS": "[0-9]+"}


def test_terms_of_the_account_are_those_of_the_code():
    told = [term for term, _ in rows("internals/account.md", "term")]

    assert told == [
        name for name in account(Counts(0, 0, 0, 0, 0, 0, paused=False, totals={}), "reliq") if name != "missing"
    ]


def test_metrics_named_in_pages_exist():
    for one in sorted((ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"`(reliq_[a-z_]+_(?:total|seconds|bytes|info|missing))[`{]", one.read_text("utf-8")))
        assert named <= set(ALL), one.name


def told_keys():
    """Return the Redis keys in the tables -> their types."""
    told = {key.strip("`"): kind for key, kind, *_ in rows(REDIS_KEYS, "key")}
    return {"{reliq:NAME}" + key if key.startswith(":") else key: kind for key, kind in told.items()}


def test_table_of_redis_keys_has_every_key_with_its_type():
    keys = Keys("NAME")
    plain = {value for value in vars(keys).values() if f"{value}".startswith("{reliq:NAME}:")}
    prefixes = {one for one in plain if one.endswith(":")}
    made = {keys.msg("ID"), keys.dedup("ID"), keys.lane("LANE"), keys.line("KEY"), keys.result("ID")}
    made.add("{reliq:NAME}:aside:MS:KEY")
    of_none = {QUEUES_KEY, WORKERS_KEY, spelled.limit_key("NAME")}
    of_none |= {name("ID") for name in (spelled.worker_key, spelled.stack_request_key, spelled.stacks_key)}

    assert len(prefixes) == len(made)
    assert set(told_keys()) == plain - prefixes | made | of_none | {keys.lane("LANE.poke")}
    for name, kind in re.findall(r'base \+ "(:[\w:]+)"  # ([a-z]+(?: set)?)[:,]', inspect.getsource(Keys)):
        assert told_keys()["{reliq:NAME}" + name] == kind


def test_table_of_redis_keys_has_every_key_written_by_some_work(url, client):
    queue, consumer = Queue("NAME", dict[str, int], url=url, per_key=1, rate="1000/s", keep_completed=10), Consumer()

    @consumer.handler(queue)
    def work(body):
        if body["n"] == 0:
            raise Reject(reason="zero")

    queue.publish_many(OutgoingMessage(body={"n": n}, id=f"order-{n}") for n in range(3))
    consumer.drain()
    queue.publish_many(OutgoingMessage(body={"n": n}, key=f"key-{n % 2}") for n in range(4))
    queue.publish({"n": 5}, delay=60, id="late")
    queue.pause(reason="a look")
    queue.cancel("late", tombstone=60)
    patterns = {
        re.sub("|".join(HOLES), lambda hole: HOLES[hole[0]], re.escape(key)): kind for key, kind in told_keys().items()
    }

    found = {key.decode(): client.type(key).decode().replace("zset", "sorted set") for key in client.scan_iter()}
    assert len(found) > 15
    for key, kind in found.items():
        assert kind in [told for pattern, told in patterns.items() if re.fullmatch(pattern, key)], key


def test_fields_of_an_envelope_are_those_of_the_code():
    assert {field.strip("`") for field, *_ in rows(REDIS_KEYS, "field")} == {
        one.encode_name for one in msgspec.structs.fields(Header)
    }

    shown = blocks(ROOT / "docs" / REDIS_KEYS, "text")[0]
    header, body = open_envelope(shown.strip().encode())
    assert (header.due, header.retries, header.headers, body) == (1795364937638, 12, {"trace": "abc"}, b'{"number":7}')


def test_state_words_are_parsed_as_the_page_says():
    read = {
        word: [StateWord.parse(one) for one in re.findall("`([^`]+)`", such)]
        for word, such, _ in rows(REDIS_KEYS, "word")
    }

    kinds = [[type(one) for one in words] for words in read.values()]
    assert kinds == [[Held], [Held], [Held], [Unset], [Backoff], [Suspect], [Delayed], [Unset, Held], [Unset]]
    assert [one.deaths for one in read["deaths, a nonce"]] == [2]
    assert all(one.cancelled for one in read["with `!`"] + read["`purged!`"])
