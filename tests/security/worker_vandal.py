"""Extreme and random input to a worker from a foreign writer, user text, a handler and an observer."""

import asyncio
import math
import random
import time

from reliq import Nack, Reject, Snooze
from reliq.errors import JobInterrupted, ProtocolError, RedisUnavailableError, UndecodableError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, worker_key

NUMBERS = [
    *("0", "-0", "1", "-1", "1.5", "1e300", "1e999", "NaN", "true", "null", '"5"', "[]", "{}", "1000", "1001"),
    *("1000000000000", "-1000000000000", "9007199254740991", "9007199254740992", str(2**63), str(-(2**63) - 1)),
    *("1" + "0" * 400, "-1" + "0" * 400, "9" * 4300, "-" + "9" * 4300, "0" * 500, "x", "", "\u00b2"),
]
SCORES = [math.inf, -math.inf, 1e300, -1e300, 9.3e9, 1.8e12, 9.2e18, -9.3e9, 0.0, -0.0, -1.0, 1e-300, 2.0**63]
WORDS = [
    *(b"", b"!", b"suspect", b"nacked", b"@", b"@0", b"@-1", b"@99999999999999999", b"@99999999999999999?", b"@1e400"),
    *(b"@" + b"9" * 400, b"suspect!", b"nacked!", b"lane.1:30000", b"lane.1:30000!", b"\xff\xfe", b"w" * 100_000, b"?"),
    *(b"lane.1:30000+1.5", b"2~lane.1:30000+1700000000000.3>1!", b"lane.1:30000+%s.%s>%s" % ((b"9" * 400,) * 3)),
    *(b"+1.5", b">1", b">1!", b">" + b"9" * 400),
]
NOTES = [
    *(b"", b"failed", b"failed 1", b"failed 1 ", "failed \u00b2 x".encode(), b"\xff", b"a b c\nd", b"lease - lease - "),
    *(b"failed " + b"9" * 4300 + b" x", b"x" * 200_000, b"\x1b]0;x\x07 \x9b31m", b"failed - \xed\xa0\xbd"),
]
IDS = [
    *(b"0", b"-1", b"+", b"+0", b"*", b"[a-z]*", b"a b", b"a\nb", b"a\tb", b"\x00", b"\xff\xfe", b"\xed\xa0\xbd"),
    *(b"%s%n", b"{x}", "\u202egnp".encode(), b"i" * 5000, b"\x1b[2J", b"a:b:c", b"None", b"..", b"0" * 22, b"z" * 22),
]
BODIES = [
    *(b"", b"\x00", b"\xff", b"{", b"null", b'{"number": 1}', b"[" * 5000, b'"\\ud83d"', b"x" * 200_000, b"RELIQ/1 "),
    *(b'RELIQ/1 {"d":1,"r":2}\nx', b'{"number": 1e999}', b'{"number": ' + b"9" * 4300 + b"}"),
]
SCHEDULES = [
    *("every 1", "every 60", "every 0", "every " + "9" * 400, "* * * * * UTC", "0 0 30 2 * UTC", "* * * * * x"),
    "x" * 9000,
]
HEADERS = ["{}", "null", "[]", '{"a":"b"}', '{"a":1}', '{"a":"\\ud83d"}', '{"traceparent":"\\u0000"}', '{"a":' * 300]


class Evil:
    """An object that raises on any access."""

    def _refuse(self, *_):
        raise ValueError("an evil secret")

    __str__ = __repr__ = __bool__ = __eq__ = __len__ = __iter__ = __getattr__ = __await__ = __format__ = _refuse
    __class__ = property(_refuse)  # type: ignore[assignment]
    __hash__ = None


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("an evil secret")


class WordlessError(Exception):
    def __str__(self):
        raise SystemExit("an evil secret")


class NamelessError(Exception, metaclass=Nameless):
    """An error with a class that raises when its name is read."""


class TornError(Exception):
    """An error with attributes that raise."""

    def __getattribute__(self, name):
        raise KeyError("an evil secret")


REASONS = [
    *("", "plain", "\ud83d", "\udcff", "\x00\x1b[2J\r\n", "x" * 1_000_000, "\u202e", None, 7, 1.5, b"\xff", []),
    *(object(), ValueError("x"), WordlessError(), Evil(), Nack, 10**5000),
]
DELAYS = [0, 0.001, -1, math.nan, math.inf, 10**400, 1e308, "soon", None, True, [], Evil(), 3650 * 86_400.0]
ERRORS = [
    *(ValueError(one) for one in ("\ud83d", "x" * 1_000_000, "\x1b]0;x\x07\n\r", b"\xff", Evil())),
    *(WordlessError(), NamelessError(), TornError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()),
    *(asyncio.CancelledError(), StopIteration(1), StopAsyncIteration(), MemoryError(), RecursionError()),
    *(TimeoutError(), ExceptionGroup("many", [ValueError("x")] * 3), JobInterrupted("x"), UndecodableError("\ud83d")),
    *(
        ProtocolError("x"),
        RedisUnavailableError("x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
        OSError(24, "x"),
    ),
]


def raising(error):
    return lambda: throw(error)


def throw(error):
    """Raise a shared error without the tracebacks of its earlier raises: their frames would look like a leak."""
    raise BaseException.with_traceback(error, None)


RETURNED = [
    *(make(reason=one) for make in (Nack, Reject) for one in REASONS),
    *(make(delay=one) for make in (Nack, Snooze) for one in DELAYS),
    *(Nack, Reject, Snooze, Evil(), 0, "x", [], (), {}, object, range(3), iter([]), float("nan")),
]
RAISED = (
    [make(delay=one) for make in (Nack, Snooze) for one in DELAYS] + [Reject(reason=one) for one in REASONS] + ERRORS
)
ANSWERS = [*(lambda value=value: value for value in RETURNED), *map(raising, RAISED), lambda: (one for one in [Nack()])]


def put(pipe, keys, place, id, score):
    """Write an id into the state `place`."""
    if place in ("ready", "retry"):
        pipe.lpush(getattr(keys, place), id)
    elif place == "garbage":
        pipe.sadd(keys.garbage, id)
    else:
        pipe.zadd(getattr(keys, place), {id: score})


class Vandal:
    """Writes random and invalid values to the Redis keys of a queue."""

    def __init__(self, client, chance: random.Random) -> None:
        self._client, self._chance = client, chance

    def number(self) -> str:
        chance = self._chance
        return chance.choice(NUMBERS) if chance.random() < 0.7 else str(chance.getrandbits(chance.choice([1, 64, 900])))

    def score(self) -> float:
        chance = self._chance
        return chance.choice(SCORES) if chance.random() < 0.7 else chance.uniform(-1, 1) * 10 ** chance.randint(0, 300)

    def blob(self, extremes: list[bytes]) -> bytes:
        chance = self._chance
        return chance.choice(extremes) if chance.random() < 0.7 else chance.randbytes(chance.randint(0, 80))

    def value(self) -> bytes:
        """Return a stored value: a random envelope around a body, or a bare body."""
        chance, body = self._chance, self.blob(BODIES)
        if chance.random() < 0.3:
            return body
        names = chance.sample(["d", "r", "e", "w"], chance.choice([2, 3, 4, 4, 4]))
        sane = {"d": "1", "r": "3", "e": "1", "w": "5"}
        parts = [f'"{name}":{self.number() if chance.random() < 0.5 else sane[name]}' for name in names]
        if chance.random() < 0.3:
            parts.append(f'"h":{chance.choice(HEADERS)}')
        return b"RELIQ/1 {" + ",".join(parts).encode() + b"}\n" + body

    def row(self) -> bytes:
        """Return the row of a stored schedule with random parts, which are often valid."""
        chance = self._chance
        first = chance.choice([b"a1 ", b"a1 ", b"xyz ", self.blob(IDS), b'a1 {"by":"me","at":1,"reason":""}'])
        ttl_ms = 5000 if chance.random() < 0.5 else self.number()
        options = f'{{"schedule":"{chance.choice(SCHEDULES)}","catch_up":"all","ttl_ms":{ttl_ms}}}'
        return b"\n".join((first, options.encode(), b',"r":3,"e":1}\nx' if chance.random() < 0.7 else self.value()))

    def message(self, keys) -> None:
        """Write one message, or a part of a message, into any state."""
        chance, pipe = self._chance, self._client.pipeline(transaction=False)
        id = self.blob(IDS) + b"~%d" % chance.getrandbits(40)
        if chance.random() < 0.9:
            pipe.set(keys.msg("").encode() + id, self.value(), px=chance.choice([60_000, 2**53]))
        if chance.random() < 0.9:
            pipe.hset(keys.retries_left, id, chance.choice(["0", "1", "2", self.number()]))
        if chance.random() < 0.3:
            pipe.hset(keys.lease, id, self.blob(WORDS))
        if chance.random() < 0.3:
            pipe.hset(keys.errors, id, self.blob(NOTES))
        places = ["ready", "ready", "retry", "pending", "unack", "garbage"]
        for place in chance.sample(places, chance.choice([1, 1, 1, 2])):
            put(pipe, keys, place, id, self.score())
        pipe.execute()

    def surroundings(self, keys) -> None:
        """Write to the keys around the messages: totals, ends, dead letters, schedules, tokens, records of workers."""
        chance, pipe = self._chance, self._client.pipeline(transaction=False)
        pipe.hset(keys.totals, chance.choice([b"claimed", b"acked", b"\xff", self.blob(IDS)]), self.number())
        pipe.xadd(keys.ends, {self.blob(IDS): self.blob(NOTES), b"kind": self.blob(NOTES)})
        pipe.xadd(keys.dead, {b"id": self.blob(IDS), b"value": self.value(), b"note": self.blob(NOTES)})
        pipe.lpush(keys.wake, *[self.blob(IDS)] * chance.choice([1, 5]))
        pipe.ltrim(keys.wake, 0, 20)
        pipe.hset(QUEUES_KEY, self.blob(IDS), self.number())
        name = self.blob(IDS)
        pipe.zadd(WORKERS_KEY, {name: self.score()})
        pipe.set(worker_key("").encode() + name, self.blob([b"[" * 5000, b"{}", b"null", b'{"id":1}']), px=60_000)
        for _ in range(5):
            plan = self.blob(IDS)
            pipe.hset(keys.plans, plan, self.row())
            pipe.zadd(keys.plans_due, {plan: time.time() if chance.random() < 0.5 else self.score()})
        pipe.hset(keys.windows, self.blob(IDS), self.number())
        pipe.hset(keys.minutes, chance.randrange(180), self.blob(NOTES))
        pipe.set(keys.token, self.number())
        pipe.set(keys.watch, self.blob(IDS), px=60_000)
        pipe.set(keys.lane("x"), self.blob(WORDS), px=60_000)
        pipe.execute()
