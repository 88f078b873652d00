"""Fill a queue with the worst data that a producer, a user's text or a foreign program can write."""

import json
import time
import unicodedata

from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, stacks_key, worker_key

#: Control characters, invisible and right-to-left characters, markup of rich, and invalid UTF-8.
TEXTS = [
    b"\x1b[2J\x1b[31m",
    b"\x1b]0;title\x07",
    b"\r\x08\x00line\nreliq: all is well",
    "\x7f\x9b31m\x9dtitle\x9c\x85".encode(),
    b"\x9b31m\xff\xfe",
    "\u202egpj.exe\u2066\u200b\u200f\u2028\u2029\ufeff\u00ad\U000e0041".encode(),
    b":id: :thinking_face: [b]bold[/b] [/b] [fe80::1] [link=http://x]",
    "Zürich 東京 \N{PARTY POPPER}".encode(),
    b"x" * 128,
]
#: Queue names that the Go layout allows and that contain shell syntax, or look like an option of a command.
NAMES = [r"x\$(ls)", "x$(ls)", "x`ls`", "x;ls", "x'y", 'x"y', "x y", "*", "?", "~root", "=ls", "%1", "x:y", "--yes"]
NUMBERS = [b"3", b"-1", b"9" * 400, b"9" * 4301, b"\xc2\xb2", b"-" + b"9" * 30, b"", b"nan", b"1e999"]
SCORES = ["+inf", "-inf", "1e300", "-1e300", "0", "99999999999", "4000000000000", "9223372036854775807", "1795300000"]
WORDS = [b"nacked", b"suspect", b"!", b"@" + b"9" * 400, b"@" + b"9" * 17, b"@4000000000001", b"\x1b[2J", b"", b"n.1:3"]
NOTES = [
    b"failed \xc2\xb2 x",
    b"failed " + b"9" * 400 + b" x",
    b"\xff\x1b[2J 1 \x1b]0;t\x07",
    b"",
    b"lease 3",
    b"9" * 5000,
]


def bodies():
    """Yield message bodies, bare and in envelopes, with content that reliq itself never writes."""
    for text in TEXTS:
        yield text
        header = json.dumps({text.decode("latin-1"): text.decode("latin-1")})
        said = json.dumps(text.decode("utf-8", "replace"), ensure_ascii=False)
        yield b'RELIQ/1 {"d":1795300000000,"r":3}\n' + said.encode()
        yield b'RELIQ/1 {"d":1795300000000,"r":3,"h":' + header.encode() + b"}\n" + text
    for number in (b"-1", b"9" * 400, b"9" * 4301, b"9007199254740991", b"1e999", b"true"):
        for name in (b"d", b"r", b"e", b"w"):
            fields = {b"d": b"1795300000000", b"r": b"3", b"e": b"1", b"w": b"1"} | {name: number}
            yield b"RELIQ/1 {" + b",".join(b'"%b":%b' % pair for pair in fields.items()) + b"}\n{}"
    yield from (b"[" * 5000 + b"]" * 5000, b"[" * 900 + b"]" * 900, b'"\\ud800"', b"9" * 5000)
    yield from (b"1e999", b"", b"null", b"RELIQ/1 {", b"\x1b[2J" * 50_000)


def complaints(text):
    """Return the characters of a text that control a terminal, are invisible, or change the order of text."""
    bad = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return sorted({repr(one) for one in text if one != "\n" and unicodedata.category(one) in bad})


def spoil(client, name="q", number=1000):
    """Fill a queue with `number` hostile messages and its other keys with hostile values; return some of the ids."""
    keys, values = Keys(name), list(bodies())
    ids = [TEXTS[at % len(TEXTS)][:120] + b"%d" % at for at in range(number)]
    ids[-50:] = [b"x" * 10_000 + id for id in ids[-50:]]
    with client.pipeline(transaction=False) as many:
        for at, id in enumerate(ids):
            many.set(keys.msg("").encode() + id, values[at % len(values)])
            many.hset(keys.retries_left, id, NUMBERS[at % len(NUMBERS)])
            many.hset(keys.lease, id, WORDS[at // 5 % len(WORDS)])
            many.hset(keys.errors, id, NOTES[at % len(NOTES)])
            score = SCORES[at // 5 % len(SCORES)]
            places = [("ZADD", keys.pending, score), ("RPUSH", keys.ready), ("ZADD", keys.unack, score)]
            places += [("RPUSH", keys.retry), ("SADD", keys.garbage)]
            many.execute_command(*places[at % 5], id)
        _beside(many, keys, ids)
        many.execute()
    return ids


def _beside(many, keys, ids):
    """Write hostile values into the Redis keys for ended messages, dead letters, totals, pause, workers and names."""
    values = list(bodies())
    for at in range(100):
        note, id, kind = NOTES[at % len(NOTES)], ids[at], TEXTS[at % len(TEXTS)]
        many.execute_command("XADD", keys.ends, "*", "id", id, "kind", kind, "note", note, "letter", b"\x1b")
        many.execute_command("XADD", keys.ends, "*", "id", id, "kind", "dead", "note", note)
        many.execute_command("XADD", keys.history, "*", "id", id, "kind", "acked", "note", NUMBERS[at % len(NUMBERS)])
        many.execute_command("XADD", keys.dead, "*", "id", id, "value", values[at % len(values)], "note", note)
    many.execute_command("XADD", keys.ends, "9999999999999999-1", "id", ids[0], "kind", "expired", "note", "")
    many.execute_command("XADD", keys.dead, "9999999999999999-1", "x", "y")
    for text in TEXTS:
        many.hincrby(keys.totals, text, 7)
        many.hset(QUEUES_KEY, text, text)
    many.hset(keys.totals, "published", 2**63 - 1)
    pause = {"by": "\x1b[2J\u202e", "at": -1e308, "reason": "\x9b2J\nreliq: all is well", "until": 1e308}
    many.set(keys.paused, json.dumps(pause))
    _of_keys(many, keys, ids)
    for at, text in enumerate(TEXTS):
        numbers = dict.fromkeys((b"seen", b"last", b"ticked", b"missed", b"paused", b"asked"), NUMBERS[at])
        row = {b"schedule": text, b"id": ids[at], b"pause": json.dumps(pause), **numbers}
        many.hset(keys.cron, mapping={text + b" " + field: value for field, value in row.items()})
    many.hset(keys.cron, mapping={"daily schedule": "0 6 * * * Nowhere", "daily last": NUMBERS[2], "": "", " ": " "})
    many.hset(QUEUES_KEY, keys.name, "1")
    many.hset(QUEUES_KEY, "spoilt", "1")
    many.hset(Keys("spoilt").totals, "acked", TEXTS[0])
    for at, text in enumerate(TEXTS):
        many.set(worker_key(f"w{at}"), _record(text, ids[at], keys.name))
        many.zadd(WORKERS_KEY, {f"w{at}": at, text: at})
        many.set(stacks_key(f"w{at}"), _report(text, ids[at], keys.name))
    for at, record in enumerate((b"[" * 5000, b"\xff", b'{"pid":' + b"9" * 400)):
        many.set(worker_key(f"x{at}"), record)
        many.zadd(WORKERS_KEY, {f"x{at}": at})
    many.rpush(worker_key("list"), "x")
    many.zadd(WORKERS_KEY, {"list": 1})


def _of_keys(many, keys, ids):
    """Write invalid key queues, used slots of keys without a message, and invalid limits."""
    for at, text in enumerate(TEXTS):
        many.execute_command("ZADD", keys.ring, at, text)
        many.execute_command("ZADD", keys.asleep, SCORES[at], text + b" too")
        many.execute_command("ZADD", keys.held, 0, text + b"\0" + ids[at])
        many.execute_command("ZADD", keys.rates, SCORES[at], text)
        many.rpush(keys.line("").encode() + text, ids[at + 20], ids[at + 60], b"nobody")
        many.hset(keys.retries_left, ids[at + 20], b"3 " + text)
        many.hset(keys.limits, b"weight:" + text, NUMBERS[at])
    many.hset(keys.limits, mapping={"on": 1, "per_key": NUMBERS[4], "key_rate_us": "0", "\x1b[2J": "\x9b"})


def _report(text, id, queue):
    said = text.decode("utf-8", "replace")
    stack = {"queue": queue, "id": id.decode("utf-8", "replace"), "frames": [said, said * 2]}
    return json.dumps({"at": 0.0, "stacks": [stack, {"queue": said, "id": said, "frames": []}], "left_out": 10**9})


def _record(text, id, queue):
    said, now = text.decode("utf-8", "replace"), time.time()
    slot = {"queue": queue, "id": id.decode("utf-8", "replace"), "attempt": 10**9, "started": 0.0}
    worker = {"id": said, "host": said, "pid": 10**9, "version": said, "queues": [queue, said], "slots": 10**9}
    return json.dumps(worker | {"busy": 1, "started": 0.0, "last_claim": now, "seen": now, "running": [slot]})
