"""Model of the scripts in plain Python: times are unix ms, and lists begin with the id that is claimed next."""

import re
from itertools import count
from math import inf
from operator import itemgetter

from account import Account
from expiring_keys import FREED_MS, LANE_MS, Body, ExpiringKeys
from msgspec.structs import replace

from reliq.lua.transitions import LEASE_DEATHS
from reliq.message import Claimed


def call_of(word):
    """Return the lane and call number that hold a message; the receipt and the state word both contain them."""
    return re.match("[^:!]*", word)[0]


class Model(ExpiringKeys, Account):
    """The states of a queue, its state words and its account."""

    def __init__(self, **options):
        ExpiringKeys.__init__(self, **options)
        Account.__init__(self)
        self.pending, self.unack = {}, {}  # id -> ms
        self.ready, self.retry, self.garbage = [], [], set()
        self.counts, self.words = {}, {}  # id -> retries left, state word
        self.windows = set()  # ids whose deduplication window is known
        self.letters = {}  # id of a dead letter -> (id, body), the oldest first
        self.deaths = count()
        self.fence = 0  # the token of the last claim that took a message
        self.token, self.paused, self.stolen = False, False, 0  # stolen: ended by foreign clients, not in the account

    @property
    def alive(self):
        return [*self.pending, *self.ready, *self.unack, *self.retry, *self.garbage]

    def put(self, place, times):
        """Set the times of ids. If the earliest time of the state has become earlier, push the wake token."""
        self.token |= bool(times) and (not place or min(times.values()) < min(place.values()))
        place |= times

    def enter(self, id, delay_ms):
        if delay_ms:
            self.put(self.pending, {id: self.up + delay_ms})
        else:
            self.ready.append(id)
            self.token = True

    def over(self, place, limit):
        """Remove and return the ids that are due, the longest due first."""
        ids = sorted((ms, id) for id, ms in place.items() if ms <= self.down)[:limit]
        return [id for _, id in ids if place.pop(id)]

    def end(self, id, kind):
        for place in (self.pending, self.unack, self.counts, self.words, self.bodies):
            place.pop(id, None)
        self.note_end(id, kind)

    def cancelled(self, id):
        return self.words.get(id, "").endswith("!")

    def kind_of(self, id):
        """Return whether a cancelled message in a list ends as cancelled or as purged."""
        return "purged" if self.words.get(id) == "purged!" else "cancelled"

    def publish(self, items, delay_ms, retries, anew, ttl_ms):
        refused, seen, ended = {}, set(), []
        due = self.due_in(delay_ms)
        self.lanes["p"] = self.key_time + LANE_MS
        for index, (id, body) in enumerate(items):
            reason = "duplicate" if id in seen else self._standing(id, anew)
            seen.add(id)
            if reason in ("duplicate", "tombstoned"):
                refused[index] = reason
                continue
            self.bodies[id] = Body(body, due, self.key_time + max(due - self.up, 0) + ttl_ms)
            self.counts[id] = retries
            self.windows.add(id)
            kind = self.kind_of(id)
            for place in (self.words, self.markers):
                place.pop(id, None)
            self.totals["published"] += 1
            if reason is None:
                self.enter(id, delay_ms)
            else:
                ended.append((kind, id))
                self.words |= {id: f"@{due}"} if delay_ms else {}
        for kind, id in sorted(ended, key=itemgetter(0)):  # the cancelled ids first
            self.note_end(id, kind)
        return refused

    def _standing(self, id, anew):
        if id in self.markers and self.markers[id][0] != "freed" and not anew:
            return "duplicate" if self.markers[id][0] == "ended" else "tombstoned"
        if id in self.garbage:
            return "duplicate"
        if id not in self.counts:
            return None
        return "revive" if self.words.get(id) in ("!", "purged!") and id not in self.unack else "duplicate"

    def promote(self, limit):
        due = self.over(self.pending, limit)
        self.ready += due
        self.token |= bool(due)
        self.totals["promoted"] += len(due)
        return len(due)

    def redrive(self, death, delay_ms, retries, ttl_ms):
        if death not in self.letters:
            return "not_found"
        id, body = self.letters[death]
        if id in self.alive:
            return "alive"
        del self.letters[death]
        self.words.pop(id, None)
        until = self.key_time + delay_ms + ttl_ms
        self.bodies[id], self.counts[id] = Body(body, self.due_in(delay_ms), until), retries
        self.totals["redriven"] += 1
        self.windows.add(id)  # its dead letter stores the deduplication window
        self.enter(id, delay_ms)
        return "redriven"

    def died(self, id):
        """Return how many deliveries in a row ended with the death of the worker."""
        word = self.words.get(id, "")
        waits, held = re.fullmatch(r"suspect(\d*)", word), re.match(r"(\d+)~", word)
        return int(waits[1] or 1) if waits else int(held[1]) if held else 0

    def waits(self, id):
        """Return whether a message in unack is not leased."""
        return self.words.get(id) == "nacked" or self.words.get(id, "").startswith("suspect")

    def suspect(self, id, died):
        self.words.pop(id, None)
        self.words |= {id: "suspect" + (str(died) if died > 1 else "")} if died else {}

    def claim(self, nonce, lease_ms, limit, first, direct, suspects):
        claimed, dropped, moved, met, token = [], [], {}, 0, max(self.now, self.fence + 1)
        held, narrowest = suspects.held, suspects.narrowest
        places = (self.retry, self.ready) if first == "retry" else (self.ready, self.retry)
        for place in () if self.paused else places:
            back, batch = [], place[: limit - len(claimed)]
            del place[: len(batch)]
            for id in batch:
                word, left = self.words.get(id, ""), self.counts[id]
                died = self.died(id)
                among = 1 if died > 2 or not left else max(1, suspects.slots >> died)
                if self.cancelled(id):
                    dropped.append((self.kind_of(id), id))
                elif word.startswith("@"):
                    self.words.pop(id)
                    moved[id] = int(word.strip("@"))
                elif (died and held + 1 > min(among, narrowest)) or ((died or not left) and not direct):
                    back.append(id)
                else:
                    direct -= bool(died or not left)
                    held, narrowest = (held + 1, min(among, narrowest)) if died else (held, narrowest)
                    claimed.append(Claimed(id, f"{died}~{nonce}" if died else nonce, left, died, token))
            place.extend(back)
            met += len(batch) - len(back)
        for kind, id in sorted(dropped, key=itemgetter(0)):  # the cancelled ids first
            self.end(id, kind)
        self.put(self.pending, moved)
        self.token |= bool(met and (self.ready or self.retry))
        self.totals["claimed"] += len(claimed)
        self.fence = token if claimed else self.fence
        if claimed or "w" in self.lanes:
            self.lanes["w"] = self.key_time + lease_ms
        return self.lease(claimed, lease_ms)

    def lease(self, claimed, lease_ms):
        for one in claimed:
            self.unack[one.id], self.words[one.id] = self.up + lease_ms, one.nonce
        return claimed

    def claim_again(self, claimed, lease_ms):
        self.lanes["w"] = self.key_time + lease_ms
        still = [one for one in claimed if self.words.get(one.id) == one.nonce and one.id in self.unack]
        self.token |= bool(still and (self.ready or self.retry))
        return self.lease([replace(one, left=self.counts[one.id]) for one in still], lease_ms)

    def held(self, receipts):
        """Return the valid receipts, and the ids of the invalid receipts."""
        good, lost = [], []
        for one in receipts:
            same = call_of(self.words.get(one.id, "")) == call_of(one.nonce)
            holds = one.id in self.unack and same and one.id not in [other.id for other in good]
            good.append(one) if holds else lost.append(one.id)
        return good, tuple(lost)

    def ack(self, receipts, kind):
        good, lost = self.held(receipts)
        stopped = [one for one in good if kind == "expired" and self.cancelled(one.id)]
        for one in sorted(good, key=lambda one: one in stopped):
            self.end(one.id, "cancelled" if one in stopped else kind)
            if one not in stopped:
                self.windows.discard(one.id)
                self.mark(one.id, "ended")
        return lost, ()

    def extend(self, receipts, lease_ms):
        good, lost = self.held(receipts)
        for one in good:
            self.unack[one.id] = self.up + lease_ms
            call, word = call_of(one.nonce), self.words[one.id]
            longest = lease_ms and max(lease_ms, int(word.removeprefix(f"{call}:").rstrip("!")))
            self.words[one.id] = f"{call}:{longest}{'!' * word.endswith('!')}"
        return lost, tuple(one.id for one in good if self.cancelled(one.id))

    def let_go(self, receipts, then, order=1, put=None):
        """End cancelled messages; remove the others from unack and pass them to `then`. `put` returns their times."""
        good, lost = self.held(receipts)
        stopped = [one.id for one in good if self.cancelled(one.id)]
        place, times = put([one for one in good if one.id not in stopped]) if put else (self.unack, {})
        self.put(place, times)
        for id in stopped:
            self.end(id, "cancelled")
        for one in good[::order]:
            if one.id not in stopped:
                if one.id not in times or place is not self.unack:
                    self.unack.pop(one.id)
                then(one)
        return lost, tuple(stopped)

    def nack(self, receipts, delay_ms, reject, unread=False):
        def put(good):
            return self.unack, {one.id: self.up + delay_ms for one in good if one.left and not reject}

        def then(one):
            self.totals["nacked"] += 1
            if one.left and not reject:
                self.words[one.id] = "nacked"
                self.postpone(one.id, delay_ms, self.up + delay_ms)
            else:
                self.bury(one.id)
                if one.id in self.bodies:
                    self.bodies[one.id].until = inf
                elif not unread:
                    self.bodies[one.id] = Body("last", self.down)

        return self.let_go(receipts, then, put=put)

    def bury(self, id):
        self.counts.pop(id)
        self.words.pop(id, None)
        self.garbage.add(id)

    def release(self, receipts):
        def then(one):
            self.suspect(one.id, one.deaths)
            self.ready.insert(0, one.id)
            self.token = True
            self.totals["released"] += 1

        return self.let_go(receipts, then, order=-1)[0], ()

    def snooze(self, receipts, delay_ms):
        def put(good):
            return self.pending, {one.id: self.up + delay_ms for one in good}

        def then(one):
            self.words.pop(one.id)
            self.postpone(one.id, delay_ms, self.up + delay_ms)
            self.totals["snoozed"] += 1

        return self.let_go(receipts, then, put=put)

    def reclaim(self, limit, spare):
        leases, told = dict(self.unack), {"overdue": [], "again": [], "buried": [], "cancelled": []}
        over = self.over(self.unack, 10 * limit if spare else limit)
        spared = [id for id in over if spare and id in self.words and not self.waits(id) and not self.cancelled(id)]
        spared = [id for id in spared if not self.words[id].endswith(":0")]  # the supervisor has ended these leases
        taken = [id for id in over if id not in spared][:limit]
        for id in over:
            word, waited = self.words.get(id), self.waits(id)
            died = self.died(id) + (not waited) if word else 0
            if id not in taken:
                self.unack[id] = leases[id]
            elif self.cancelled(id):
                told["cancelled"].append(id)
                self.end(id, "cancelled")
            elif not self.counts[id] or died >= LEASE_DEATHS:
                told["buried"].append(id)
                self.bury(id)
                if id in self.bodies:
                    self.bodies[id].until = inf
            else:
                told["again" if waited else "overdue"].append(id)
                self.totals["retried_lease"] += not waited
                self.totals["retried_nack"] += word == "nacked"
                self.suspect(id, died)
                if died > 1 and not waited:
                    self.unack[id] = self.up + 1000 * 2 ** (died - 1)
                    continue
                self.counts[id] -= 1
                self.retry.append(id)
                self.token = True
        return told

    def cancel(self, id, tombstone_ms, kind):
        before, until = self.markers.get(id, ("", -inf))
        answer, found = "cancelled", True
        if id in self.pending or (id in self.unack and self.waits(id)):
            self.end(id, kind)
            self.windows.discard(id)
        elif id in self.unack:
            answer = "running"
            self.words[id] = self.words.get(id, "").rstrip("!") + "!"
            self.bodies.pop(id, None)
        elif id in self.counts:
            self.words[id] = self.words[id] if self.cancelled(id) else {"purged": "purged!"}.get(kind, "!")
            self.bodies.pop(id, None)
        else:
            found, answer = False, "cancelled" if before in ("cancelled", "freed") else "not_found"
        mark = "unknown" if answer == "not_found" else "cancelled"
        if tombstone_ms is None:
            if found and answer == "cancelled" and before not in ("cancelled", "unknown"):
                self.mark(id, "freed", FREED_MS)
        elif until - self.key_time < tombstone_ms or (mark == "cancelled" and before != mark):
            self.mark(id, mark, tombstone_ms)
        return answer

    def reschedule(self, id, delay_ms):
        word, due, before = self.words.get(id, ""), self.up + delay_ms, self.down
        if id in self.pending or (id in self.unack and self.waits(id)):
            place = self.pending if id in self.pending else self.unack
            before = place[id]
            self.put(place, {id: due})
        elif id in self.unack:
            return "running"
        elif id in self.counts and not self.cancelled(id):
            before = int(word.strip("@")) if word.startswith("@") else self.down
            self.words[id] = f"@{due}"
        else:
            return "not_found"
        self.postpone(id, due - before, due)
        return "rescheduled"

    def collect(self, ids, dead_letter_limit):
        told = {"dead": [], "expired": []}
        for id in sorted(dict.fromkeys(ids), key=lambda one: one not in self.bodies):
            if id in self.garbage:
                self.garbage.remove(id)
                body = self.bodies.pop(id, None)
                kind = "dead" if body else "expired"
                told[kind].append(id)
                self.note_end(id, kind)
                if body:
                    self.letters[next(self.deaths)] = (id, body.text)
                if body or id in self.windows:
                    self.mark(id, "ended")
                self.windows.discard(id)
        while len(self.letters) > dead_letter_limit:
            self.totals["letters_dropped"] += bool(self.letters.pop(min(self.letters)))
        return tuple(told["dead"]), tuple(told["expired"])

    def purge(self, ids, state):
        place, before = getattr(self, state), len(self.alive)
        for index, id in enumerate(ids):
            if isinstance(place, list):
                if place[:1] == [id] and before - len(self.alive) == index:
                    self.end(place.pop(0), "purged")
                    self.taken(id)
            elif id in place:
                self.garbage.discard(id)
                self.end(id, "purged")
                self.taken(id)
        return before - len(self.alive)

    def taken(self, id):
        """Keep the id of an ended message taken for its deduplication window, if the window is known."""
        if id in self.windows:
            self.mark(id, "ended")
        self.windows.discard(id)

    def tidy(self):
        self.windows &= self.counts.keys() | self.garbage
        for id, deadline in self.unack.items():
            if nonce := re.search(r":(\d+)!?$", self.words.get(id, "")):
                self.unack[id] = min(deadline, self.up + int(nonce[1]))
        for id in self.words.keys() - self.counts.keys() - self.garbage:
            del self.words[id]
