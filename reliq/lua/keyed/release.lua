-- release: unack -> head of ready, or of the line of its key, no retry spent
--
-- KEYS  unack ready retries_left lease errors totals ends wake
-- ARGV  clock sleep_ms | id nonce
-- Runs  unack:ZMSCORE,ZREM ready:EXISTS,RPUSH retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH
-- Keyed  retry:EXISTS watch:DEL limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE,ZREM held:ZCARD,ZLEXCOUNT,ZREM
--       asleep:ZADD,ZMSCORE,ZRANGE,ZSCORE rates:ZSCORE line:EXISTS,RPUSH | key
-- Returns  the ids whose receipt no longer holds
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- With `sleep_ms` the messages' keys sleep for so long from now on, those that sleep for longer as long as before; of a
-- message without a key the queue sleeps.

local ids, holding, stopped, lost, _, receipt_of = receipts()
local freed, suspects, calm, sleepers, untils = {}, {}, {}, {}, {}
know(receipt_of)
for j = #holding, 1, -1 do
  local id, died = ids[holding[j]], deaths(arg(holding[j], NONCE))
  freed[#freed + 1] = id
  if died > 0 then pair(suspects, id, suspect(died)) else calm[#calm + 1] = id end
  local key = priorities[key_of[id]] and '' or key_of[id]
  local before, wanted = ms_of(redis.call('ZSCORE', asleep, key) or 0), now_up + (tonumber(sleep_ms) or 0)
  if sleep_ms ~= '' and before < wanted then sleepers[#sleepers + 1], untils[#untils + 1] = key, wanted end
end

begin(unack)
put(asleep, untils, sleepers)
run('ZREM', ring, sleepers)
if run('RPUSH', ready, come_back(freed)) then offer() end
run('HSET', lease, suspects)
run('ZREM', unack, freed)
run('HDEL', lease, calm)
stop(stopped)
add('released', #freed)
free_places(freed)
free_places(stopped)
return lost
