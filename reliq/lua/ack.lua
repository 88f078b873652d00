-- ack: unack -> gone
--
-- KEYS  unack retries_left lease errors totals ends history windows | msg dedup
-- ARGV  clock kind history_max keyed | id nonce window took_ms key
-- Runs  unack:ZMSCORE,ZREM retries_left:HDEL lease:HDEL,HMGET errors:HDEL,HMGET totals:HINCRBY ends:XADD history:XADD
--       windows:HDEL,HMGET msg:UNLINK dedup:SET
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZREM,ZSCORE
--       rates:ZADD,ZSCORE wake:LLEN,LPUSH ready:EXISTS retry:EXISTS line:EXISTS
-- Returns  the ids with an invalid receipt
-- Nothing to do: an invalid receipt changes nothing.
--
-- `kind` is `acked`, or `expired` for messages without a body at the claim (cancelled messages then end as
-- `cancelled`). The call has dedup keys if an id may be a chosen id. Such an id stays blocked for the time given by its
-- publish, else for `window` ms. Of the acked messages, the last `history_max` are kept with their run time `took_ms`.
-- For an expired message `took_ms` is the token of its claim. It never started, so a queue with keys returns its start
-- to the rates.

local ids, held, stopped, lost, _, receipt_of = receipts(kind == 'acked')
local done, bodies, spans, took = {}, {}, {}, {}
-- keyed: note_keys(receipt_of)
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
