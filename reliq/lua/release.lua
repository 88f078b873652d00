-- release: unack -> head of ready, no retry spent
--
-- KEYS  unack ready retries_left lease errors totals ends wake
-- ARGV  clock sleep_ms keyed | id nonce key
-- Runs  unack:ZMSCORE,ZREM ready:RPUSH retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH
-- Keyed  ready:EXISTS retry:EXISTS watch:DEL limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE,ZREM held:ZCARD,ZLEXCOUNT,ZREM
--       asleep:ZADD,ZMSCORE,ZRANGE,ZSCORE rates:ZSCORE line:EXISTS,RPUSH
-- Returns  the ids whose receipt no longer holds
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- A suspect stays one. The first in the tail is the first to be claimed again.

local ids, held, stopped, lost = receipts()
local freed, suspects, calm = {}, {}, {}
for j = #held, 1, -1 do
  local id, died = ids[held[j]], deaths(arg(held[j], NONCE))
  freed[#freed + 1] = id
  if died > 0 then pair(suspects, id, suspect(died)) else calm[#calm + 1] = id end
end

begin(unack)
if run('RPUSH', ready, freed) then push_token() end
run('HSET', lease, suspects)
run('ZREM', unack, freed)
run('HDEL', lease, calm)
stop(stopped)
add('released', #freed)
return lost
