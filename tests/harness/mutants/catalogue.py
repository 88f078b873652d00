"""The mutants: what is written instead of what, and who is to notice."""

from tests.harness.mutants.mutant import HARNESS, MODEL, Mutant
from tests.harness.mutants.of_keys import MUTANTS_OF_KEYS

#: Whatever is in unack counts as held, by whomever.
_ANY_RECEIPT = """
for _, id in ipairs(lost) do
  for i = 1, redis.call('ZSCORE', unack, id) and #ids or 0 do
    if ids[i] == id then
      held[#held + 1] = i
      WORDS
    end
  end
end
"""
_RECEIPTS = {
    "ack": "local ids, held, stopped, lost = receipts(kind == 'acked')\n",
    "extend": "local ids, held, _, lost, words = receipts(true)\n",
}


def _without_receipt(verb: str, examples: int) -> Mutant:
    receipts = _RECEIPTS.get(verb, "local ids, held, stopped, lost = receipts()\n")
    anybody = _ANY_RECEIPT.replace("WORDS", "words[i] = words[i] or 'anybody'" if verb == "extend" else "")
    return Mutant(f"{verb} without receipt", f"lua/{verb}.lua", receipts, receipts + anybody, MODEL, examples)


MUTANTS = (
    Mutant(
        "seconds clock",
        "lua/prelude.lua",
        "math.ceil(us / 1000), math.floor(us / 1000)",
        "math.floor(us / 1000000) * 1000, math.floor(us / 1000000) * 1000",
        examples=50,
    ),
    _without_receipt("ack", 200),
    _without_receipt("nack", 200),
    _without_receipt("extend", 200),
    _without_receipt("release", 200),
    _without_receipt("snooze", 200),
    Mutant("claim leaves an id behind", "lua/claim.lua", "0, -one.size - 1)", "0, -one.size)", examples=50),
    Mutant(
        "no heartbeat",
        "worker/renewer.py",
        "        if due:\n            self._extend(due)\n",
        "",
        HARNESS,
    ),
    Mutant(
        "publish is not idempotent",
        "lua/publish.lua",
        "local answer = recall()\nif answer then\n",
        "local answer\nif answer then\n",
        examples=100,
    ),
    Mutant(
        "cancel skips ready",
        "lua/cancel.lua",
        "id, runs and (word or '') .. '!' or '!')",
        "id, runs and (word or '') .. '!' or nil)",
        examples=100,
    ),
    Mutant(
        "release spends a retry",
        "lua/release.lua",
        "  freed[#freed + 1] = id\n",
        "  freed[#freed + 1] = id\n  redis.call('HINCRBY', retries_left, id, -1)\n",
        examples=100,
    ),
    Mutant(
        "reclaim drops the third id of a batch",
        "lua/reclaim.lua",
        "redeliver(back)\n",
        "redeliver({ unpack(back, 1, 2) })\n",
        examples=200,
    ),
    Mutant(
        "collect deletes a reused id",
        "lua/collect.lua",
        "redis.call('SISMEMBER', garbage, id) == 1 then",
        "redis.call('SISMEMBER', garbage, id) >= 0 then",
        examples=50,
    ),
    Mutant(
        "suspects are batched",
        "lua/prelude.lua",
        "if suspects + 1 > math.min(room, narrowest) then return false end",
        "",
        examples=200,
    ),
    Mutant(
        "a worker does not know that it holds a suspect",
        "worker/slots.py",
        "return Suspects(self.limit, len(self.rooms), min(self.rooms, default=self.limit))",
        "return Suspects(self.limit, 0, self.limit)",
        "tests/worker/test_suspects.py",
    ),
    Mutant(
        "deadlines rounded down",
        "lua/claim.lua",
        "score(now_up + lease_ms)",
        "score(now_down + lease_ms)",
        examples=100,
    ),
    Mutant("promoted within the last millisecond", "lua/promote.lua", "score(now_down)", "score(now_up)", examples=200),
    Mutant("reclaimed within the last millisecond", "lua/reclaim.lua", "score(now_down)", "score(now_up)"),
    Mutant(
        "a lane's answer is forgotten",
        "lua/prelude.lua",
        "return last == number and answer or 'stale'",
        "return last ~= number and 'stale' or nil",
        examples=100,
    ),
    Mutant(
        "a lane takes a number that is too low",
        "lua/prelude.lua",
        "return last == number and answer or 'stale'",
        "return last == number and answer or nil",
        examples=100,
    ),
    Mutant(
        "acks are not counted where they happen",
        "lua/ack.lua",
        "  add(kind, #done)\n",
        "",
        examples=100,
    ),
    Mutant(
        "a cancelled message that fails is delivered again",
        "lua/nack.lua",
        "= receipts()\n",
        "= receipts(true)\n",
    ),
    Mutant(
        "a stale receipt matches a message that was redriven",
        "lua/redrive.lua",
        "run('HDEL', lease, ids)\n",
        "",
    ),
    Mutant(
        "a longer extension is cut",
        "lua/extend.lua",
        "run('HSET', lease, longer)\n",
        "",
        "tests/scripts/test_rules_ends.py",
    ),
    Mutant("what comes due wakes nobody", "lua/promote.lua", "then push_token() end", "then end", examples=200),
    Mutant(
        "a nack does not move the expiry",
        "lua/prelude.lua",
        "local left = by_ms ~= 0 and",
        "local left = by_ms > 1e12 and",
        examples=200,
    ),
    Mutant(
        "the time to live runs while a message waits",
        "lua/publish.lua",
        "math.max(due - now_up, 0) + ttl_ms",
        "tonumber(ttl_ms)",
        examples=50,
    ),
    Mutant(
        "released to the far end of the list",
        "lua/release.lua",
        "run('RPUSH', ready, freed)",
        "run('LPUSH', ready, freed)",
        examples=100,
    ),
    Mutant(
        "an outage makes a worker forget its answers",
        "worker/settler.py",
        "            _note_try(self._unsettled, error)\n            if isinstance",
        "            self._unsettled.clear()\n            if isinstance",
        "tests/worker/test_faults.py",
    ),
    Mutant(
        "a message is started after its lease",
        "worker/runner.py",
        "if held.lost or run.started_at >= held.lease_until:",
        "if held.lost:",
        "tests/worker/test_runner.py",
    ),
    Mutant(
        "a last chance goes with a batch",
        "worker/slots.py",
        "while len(deliveries) < self.batch and not first.must_start and waiting and not waiting[0].must_start:",
        "while len(deliveries) < self.batch and waiting:",
        "tests/worker/test_batches.py",
    ),
    Mutant(
        "a publish is tried again under a new number",
        "client/lanes.py",
        "                    return lane, lane.same()\n",
        "                    return lane, lane.next()\n",
        "tests/queue/test_lost_replies.py",
    ),
    Mutant(
        "a tick is made by everybody who looks",
        "lua/tick.lua",
        "asked == '' and last ~= since or",
        "asked == '' and not last or",
        "tests/scripts/test_rules_periodic.py",
    ),
    Mutant(
        "a periodic entry goes on before its tick is published",
        "lua/tick.lua",
        "if answer == 'published' and not alive(id)",
        "if asked == '' then redis.call('HSET', cron, of('last'), tick) end\nif answer == 'published' and not alive(id)",
        "tests/scripts/test_rules_periodic.py",
    ),
    Mutant(
        "the inbox lets everybody in",
        "outbox/effects.py",
        "        if write(tx, note) == 1:\n",
        "        if write(tx, note) >= 0:\n",
        "tests/outbox/test_inbox.py",
    ),
    Mutant(
        "the inbox goes by the id alone",
        "outbox/effects.py",
        "        note = taking_note(*self._first, self._keep_ms(keep), prefix)\n        if write",
        "        note = taking_note(self.queue, self.id, 0, self._keep_ms(keep), prefix)\n        if write",
        "tests/outbox/test_inbox.py",
    ),
    Mutant(
        "a relay notes rows as sent before it publishes them",
        "relay/mover.py",
        "        redis.sent, redis.given_up, redis.failed = [], [], []\n",
        "        redis.sent, redis.given_up, redis.failed = earlier + new, [], []\n"
        "        self.store.begin()\n        self._note_answers()\n        self.store.commit()\n        redis.sent = []\n",
        "tests/outbox/test_relay.py",
    ),
    Mutant(
        "a late relay sends rows under a new number",
        "relay/mover.py",
        "True, rows, number, None, fence))",
        "True, rows, self.redis.lanes.take().next(), None, fence))",
        "tests/outbox/test_relay.py",
    ),
    Mutant(
        "the token is the clock alone",
        "lua/prelude.lua",
        "last and last >= us and last < 2 ^ 53 and last + 1 or us",
        "us",
        "tests/scripts/test_rules_token.py",
    ),
    *MUTANTS_OF_KEYS,
)
