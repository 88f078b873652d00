"""The Redis content of a queue with keys at one moment, and its invariants."""

from collections import Counter
from functools import cached_property
from math import inf

from reliq.wire_format import Held, StateWord, is_key

#: Prefix before the key of a message that keeps the slot of its key during a backoff.
KEPT = "\2"


def texts(reply):
    return [one.decode() for one in reply]


def times(reply):
    """Unix ms by name; the time of a paused key is infinite."""
    return {name.decode(): score if score == inf else round(score * 1000) for name, score in reply}


def pairs(reply):
    return {name.decode(): value.decode() for name, value in reply.items()}


class KeyedState:
    """
    A queue at one moment.

    Attributes:
        counts: id -> its retry count as stored, `3` or `3 KEY`.
        lines: key -> its waiting ids, the next first.
        places: (key, id) of each taken place.
        kept: ids that keep their place during a backoff.
    """

    def __init__(self, client, keys):
        with client.pipeline() as pipe:
            pipe.keys(keys.line("").translate({ord("{"): "[{]", ord("}"): "[}]"}) + "*")
            for key in (keys.pending, keys.unack, keys.asleep, keys.rates, keys.ring):
                pipe.zrange(key, 0, -1, withscores=True)
            pipe.zrange(keys.held, 0, -1).lrange(keys.ready, 0, -1).lrange(keys.retry, 0, -1).smembers(keys.garbage)
            pipe.hgetall(keys.retries_left).hgetall(keys.lease).llen(keys.wake).exists(keys.paused)
            names, pending, unack, asleep, rates, ring, held, *lists, garbage, counts, words, tokens, paused = (
                pipe.execute()
            )
            names = [name.decode() for name in names]
            for name in names:
                pipe.lrange(name, 0, -1)
            lines = pipe.execute()
        self.lines = {
            name.removeprefix(keys.line("")): texts(ids)[::-1] for name, ids in zip(names, lines, strict=True)
        }
        self.pending, self.unack, self.asleep = times(pending), times(unack), times(asleep)
        self.rates, self.ring = {key.decode(): full for key, full in rates}, {key.decode(): turn for key, turn in ring}
        members = [tuple(member.decode().split("\0", 1)) for member in held]
        self.kept = {id for key, id in members if key == KEPT}
        self.places = {(key, id) for key, id in members if key != KEPT}
        self.ready, self.retry = (texts(ids)[::-1] for ids in lists)
        self.garbage, self.counts, self.words = {*texts(garbage)}, pairs(counts), pairs(words)
        self.token, self.paused = bool(tokens), bool(paused)

    def key_of(self, id):
        return self.counts.get(id, "").partition(" ")[2]

    @cached_property
    def met(self):
        """Return how often each id occurs in the states, without garbage."""
        lists = (self.pending, self.unack, self.ready, self.retry, *self.lines.values())
        return Counter(id for place in lists for id in place)

    @cached_property
    def leased(self):
        """Return the leased ids in unack, including expired leases."""
        return {id for id in self.unack if isinstance(StateWord.parse(self.words.get(id, "").encode()), Held)}

    @property
    def waiting(self):
        """The ids in unack that wait for their backoff and are not leased."""
        return {*self.pending} | (self.unack.keys() - self.leased)

    @cached_property
    def tally(self):
        """Return the number of used slots of each key."""
        return Counter(key for key, _ in self.places)

    @property
    def running(self):
        """Return the number of slots that running messages use."""
        return len(self.places) - len(self.kept)

    def cancelled(self, id):
        return self.words.get(id, "").endswith("!")

    def may_be_served(self, key, per_key):
        """Return whether a key has waiting messages and a free place, and does not sleep."""
        return (
            key in self.lines
            and key not in self.asleep
            and not (per_key and is_key(key) and self.tally[key] >= per_key)
        )


def check_places(state):
    """Each living id is in exactly one state; garbage ids are in no other state."""
    assert state.met == Counter(state.counts.keys())
    assert not state.garbage & state.counts.keys()


def check_held(state):
    """Each place belongs to a leased id or to an id that keeps its place; each leased id has a place."""
    assert state.kept <= state.waiting
    assert set(state.places) == {(state.key_of(id), id) for id in state.leased | state.kept}


def check_ring(state, per_key, *, is_steady):
    """
    Each key with waiting messages is in the ring, sleeps, or has all places taken; the ring has no other keys.

    Unless limits are `is_steady`, the ring may have a key without a free place: the next claim removes it.
    """
    may = {key for key in state.lines if state.may_be_served(key, per_key)}
    assert may <= state.ring.keys()
    assert not is_steady or state.ring.keys() - {""} <= may
    assert state.ring.keys() - {""} <= state.lines.keys()
    assert not state.ring.keys() & state.asleep.keys() - {""}


def check_rate(starts, every_us, burst):
    """In no span are there more starts than the bucket permits; `starts` are in unix us, the last is new."""
    last = starts[-1]
    for number, start in enumerate(reversed(starts), 1):
        assert (number - burst) * every_us <= last - start, (starts[-number:], every_us, burst)
