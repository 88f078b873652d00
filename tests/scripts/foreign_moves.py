"""Moves of a Go consumer in the same queue: it uses only the seven Redis keys of the Go library, and its own clock."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from queue_machine import IDS, Moves

held_by_someone = precondition(lambda self: self.model.unack)


class ForeignMoves(Moves):
    """The moves of reliq, and those of a foreign consumer."""

    @rule(retried=st.booleans())
    def go_claims(self, retried):
        place, key = (self.model.retry, self.keys.retry) if retried else (self.model.ready, self.keys.ready)
        self.go_pops(place, key)

    def go_pops(self, place, key):
        if place:
            id, second = place.pop(0), self.model.down // 1000 + 20
            self.client.rpop(key)
            self.client.zadd(self.keys.unack, {id: second})
            self.model.unack[id] = second * 1000

    @rule()
    def go_reclaims(self):
        for id in self.model.over(self.model.unack, limit=len(IDS)):
            self.client.zrem(self.keys.unack, id)
            if self.model.counts[id]:
                self.client.hincrby(self.keys.retries_left, id, -1)
                self.client.lpush(self.keys.retry, id)
                self.model.counts[id] -= 1
                self.model.retry.append(id)
            else:
                self.client.hdel(self.keys.retries_left, id)
                self.client.sadd(self.keys.garbage, id)
                self.model.counts.pop(id)
                self.model.garbage.add(id)

    @held_by_someone
    @rule(pick=st.integers(0, 5), seconds=st.integers(-2, 30))
    def go_scores_a_lease_anew(self, pick, seconds):
        id, second = sorted(self.model.unack)[pick % len(self.model.unack)], self.model.down // 1000 + seconds
        self.client.zadd(self.keys.unack, {id: second})
        self.model.unack[id] = second * 1000

    @held_by_someone
    @rule(pick=st.integers(0, 5))
    def go_acks(self, pick):
        self.go_ends(sorted(self.model.unack)[pick % len(self.model.unack)])

    def go_ends(self, id):
        self.client.zrem(self.keys.unack, id)
        self.client.hdel(self.keys.retries_left, id)
        self.client.delete(self.keys.msg(id))
        for place in (self.model.unack, self.model.counts, self.model.bodies):
            place.pop(id, None)
        self.model.stolen += 1

    @precondition(lambda self: self.model.garbage)
    @rule()
    def go_collects(self):
        self.client.delete(self.keys.garbage, *map(self.keys.msg, self.model.garbage))
        for id in self.model.garbage:
            self.model.bodies.pop(id, None)
        self.model.stolen += len(self.model.garbage)
        self.model.garbage.clear()
