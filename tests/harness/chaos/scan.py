"""The invariants of the Redis content: read everything in one MULTI, then check it with pure functions."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from reliq.keys import Keys, pattern
from reliq.wire_format import Held, StateWord
from tests.harness.chaos.vandal import FOREIGN, MARK
from tests.harness.chaos.workload import PER_KEY

ENDS = ("acked", "dead", "expired", "cancelled", "purged")
GONE_AT_THE_END = {
    *("pending", "ready", "unack", "retry", "garbage", "lease", "errors", "msg"),
    *("held", "ring", "asleep", "line"),
}

#: Reads every key queue: its key, then its ids.
_LINES = """
local found = {}
for _, name in ipairs(ARGV[1] ~= '' and redis.call('KEYS', ARGV[1]) or {}) do
  found[#found + 1] = { name:sub(#KEYS[1] + 1), unpack(redis.call('LRANGE', name, 0, -1)) }
end
return found
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The Redis structures of a queue at one moment."""

    pending: tuple[str, ...]
    ready: tuple[str, ...]
    unack: tuple[str, ...]
    retry: tuple[str, ...]
    garbage: tuple[str, ...]
    counts: Mapping[str, str]
    words: Mapping[str, str]
    totals: Mapping[str, int]
    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    places: frozenset[str] = frozenset()
    served: frozenset[str] = frozenset()

    @property
    def alive(self) -> tuple[str, ...]:
        """Return every id in any state."""
        lists = self.pending + self.ready + self.unack + self.retry + self.garbage
        return lists + tuple(id for line in self.lines.values() for id in line)


def take(client: redis.Redis, keys: Keys) -> Snapshot:
    """Read a queue in one MULTI."""
    with client.pipeline(transaction=True) as pipe:
        pipe.zrange(keys.pending, 0, -1).lrange(keys.ready, 0, -1).zrange(keys.unack, 0, -1)
        pipe.lrange(keys.retry, 0, -1).smembers(keys.garbage)
        pipe.hgetall(keys.retries_left).hgetall(keys.lease).hgetall(keys.totals)
        pipe.eval(_LINES, 1, keys.line(""), f"{pattern(keys.line(''))}*" if keys.name in PER_KEY else "")
        pipe.zrange(keys.held, 0, -1).zrange(keys.ring, 0, -1).zrange(keys.asleep, 0, -1)
        *places, counts, words, totals, lines, held, ring, asleep = pipe.execute()
    return Snapshot(
        *(tuple(id.decode() for id in place) for place in places),
        counts=_texts(counts),
        words=_texts(words),
        totals={kind: int(number) for kind, number in _texts(totals).items()},
        lines={key.decode(): tuple(id.decode() for id in ids) for key, *ids in lines},
        places=frozenset(member.decode() for member in held),
        served=frozenset(key.decode() for key in (*ring, *asleep)),
    )


def broken(look: Snapshot) -> list[str]:
    """Return the violated invariants, each with an example."""
    twice = [id for id, times in Counter(look.alive).items() if times > 1]
    countable = {*look.alive} - {*look.garbage}
    words = {id: StateWord.parse(text) for id, text in look.words.items()}
    held = {id for id, word in words.items() if isinstance(word, Held)}
    checks = {
        "in two places": twice,
        "without a retry count": countable - look.counts.keys(),
        "with a retry count but in no place": look.counts.keys() - countable,
        "in unack, held by nobody": [
            id for id in look.unack if id not in held and not (id in words and words[id].waits)
        ],
        "held, but not in unack": held - {*look.unack},
        "with a state word but not alive": look.words.keys() - {*look.alive},
        "with a retry count that is none": [
            id for id, left in look.counts.items() if not left.partition(" ")[0].isdigit()
        ],
        **_of_keys(look, held),
    }
    found = []
    for what, ids in checks.items():
        if ours := [id for id in ids if not id.startswith(MARK)]:
            found.append(f"{len(ours)} ids {what}, such as {min(ours)}")
    if missing := balance(look.totals, len(look.alive)):
        found.append(f"the account is off by {missing}")
    return found


def _of_keys(look: Snapshot, held: set[str]) -> dict[str, Collection[str]]:
    """Return the violated invariants of keys: description -> offenders."""
    key_of = {id: key for id, count in look.counts.items() if (key := count.partition(" ")[2].partition("\3")[0])}
    leased = {f"{key}\0{id}" for id, key in key_of.items() if id in held}
    taken = Counter(place.partition("\0")[0] for place in look.places)
    most = max((number for key, number in taken.items() if key.startswith("key-")), default=0)
    free = {key for key in look.lines if not taken[key]}
    return {
        "leased without a place of their key": leased - look.places,
        "of keys that nobody will serve": free - look.served,
        "of keys with more places than any queue has": ["3"] if most > max(PER_KEY.values()) else [],
    }


def balance(totals: Mapping[str, int], alive: int) -> int:
    """Return the messages that the account misses: published + redriven + hostile - ended - alive."""
    came = sum(totals.get(kind, 0) for kind in ("published", "redriven", FOREIGN))
    return came - sum(totals.get(kind, 0) for kind in ENDS) - alive


def leftovers(client: redis.Redis, keys: Keys) -> dict[str, int]:
    """Return how many Redis keys remain that must not exist when no message is alive."""
    base = keys.pending.removesuffix("pending")
    names = {key.decode().removeprefix(base) for key in client.scan_iter(f"{pattern(base)}*", count=1000)}
    return Counter(name for name in (name.partition(":")[0] for name in names) if name in GONE_AT_THE_END)


def _texts(reply: Mapping[Any, Any]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in reply.items()}
