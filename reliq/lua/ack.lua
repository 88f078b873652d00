-- ack: unack -> gone
--
-- KEYS  unack retries_left lease errors totals ends history windows | msg dedup
-- ARGV  clock kind history_max keyed | id nonce window took_ms key
-- Runs  unack:ZMSCORE,ZREM retries_left:HDEL lease:HDEL,HMGET errors:HDEL,HMGET totals:HINCRBY ends:XADD history:XADD
--       windows:HDEL,HMGET msg:UNLINK dedup:SET
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZREM,ZSCORE
--       rates:ZADD,ZSCORE wake:LLEN,LPUSH ready:EXISTS retry:EXISTS line:EXISTS
-- Returns  the ids whose receipt no longer holds
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `kind` is how the messages end: `acked`, or `expired` when their bodies were gone at the claim (a cancelled
-- one then ends as `cancelled`). There are dedup keys when an id may be a chosen one: it stays taken then,
-- for as long as its publish said, or for `window` when nothing says so any more.
-- The last `history_max` acked ones are remembered, each with how long it ran, if `took_ms` says it. Of an expired
-- message `took_ms` is the token of its claim: it never started, so a queue with keys gives its start back to the rates.

local ids, held, stopped, lost, _, receipt_of = receipts(kind == 'acked')
local done, bodies, spans, took = {}, {}, {}, {}
-- keyed: know(receipt_of)
for j, i in ipairs(held) do done[j], bodies[j], spans[j], took[j] = ids[i], body(i), arg(i, WINDOW), arg(i, TOOK_MS) end

begin(unack)
take(done, held, spans)
run('ZREM', unack, done)
if kind == 'expired' then
  finish(kind, done)
  stop(stopped)
else
  forget(done)
  add(kind, #done)
  note_ends(history, tonumber(history_max), kind, done, took, {})
end
if #bodies > 0 then redis.call('UNLINK', unpack(bodies)) end
-- keyed: free_places(done) free_places(stopped)
-- keyed: if kind == 'expired' then give_back(done, stopped) end
return lost
