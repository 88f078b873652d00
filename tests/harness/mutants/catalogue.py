"""The mutants: the replaced text, its replacement, and the tests that must fail."""

from tests.harness.mutants.mutant import HARNESS, Mutant
from tests.harness.mutants.of_keys import MUTANTS_OF_KEYS

#: In this mutant, a worker treats every message in unack as its own.
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
    "ack": "local ids, held, stopped, lost, _, receipt_of = receipts(kind == 'acked')\n",
    "extend": "local ids, held, _, lost, words = receipts('any')\n",
    "release": "local ids, held, stopped, lost, words, receipt_of = receipts()\n",
}


def _without_receipt(verb: str) -> Mutant:
    receipts = _RECEIPTS.get(verb, "local ids, held, stopped, lost, _, receipt_of = receipts()\n")
    anybody = _ANY_RECEIPT.replace("WORDS", "words[i] = words[i] or 'anybody'" if verb in ("extend", "release") else "")
    return Mutant(f"{verb} without receipt", f"lua/{verb}.lua", receipts, receipts + anybody, examples=200)


MUTANTS = (
    Mutant(
        "seconds clock",
        "lua/prelude.lua",
        "math.ceil(us / 1000), math.floor(us / 1000)",
        "math.floor(us / 1000000) * 1000, math.floor(us / 1000000) * 1000",
        examples=50,
    ),
    *(_without_receipt(verb) for verb in ("ack", "nack", "extend", "release", "snooze")),
    Mutant("claim leaves an id behind", "lua/prelude.lua", "0, -row.at - 1)", "0, -row.at)", examples=50),
    Mutant("no heartbeat", "worker/settler.py", "        self._extend(due)\n", "", by=HARNESS),
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
        "or kind == 'purged' and 'purged!' or '!')",
        "or nil)",
        examples=100,
    ),
    Mutant(
        "release spends a retry",
        "lua/release.lua",
        "  freed[j] = id\n",
        "  freed[j] = id\n  redis.call('HINCRBY', retries_left, id, -1)\n",
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
        "deadlines rounded down",
        "lua/claim.lua",
        "score(now_up + lease_ms)",
        "score(now_down + lease_ms)",
        examples=100,
    ),
    Mutant("promoted within the last millisecond", "lua/promote.lua", "score(now_down)", "score(now_up)", examples=200),
    Mutant(
        "a lane's answer is forgotten",
        "lua/prelude.lua",
        "return last == number and answer or 'stale'",
        "return last ~= number and 'stale' or nil",
        examples=100,
    ),
    Mutant("acks are not counted where they happen", "lua/ack.lua", "  add(kind, #done)\n", "", examples=100),
    Mutant("a cancelled message that fails is delivered again", "lua/nack.lua", "= receipts()\n", "= receipts(true)\n"),
    Mutant("a stale receipt matches a message that was redriven", "lua/redrive.lua", "run('HDEL', lease, ids)\n", ""),
    Mutant(
        "a longer extension is cut",
        "lua/extend.lua",
        "run('HSET', lease, longer)\n",
        "",
        examples=200,
    ),
    Mutant(
        "what comes due wakes nobody",
        "lua/prelude.lua",
        "ids)\n  if run('LPUSH', ready, ids) then push_token() end",
        "ids)\n  run('LPUSH', ready, ids)",
        examples=200,
    ),
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
        "run('RPUSH', ready, reversed(come_back(freed)))",
        "run('LPUSH', ready, reversed(come_back(freed)))",
        examples=100,
    ),
    *MUTANTS_OF_KEYS,
)
