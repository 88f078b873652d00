-- sleep: throttle, pause or resume a message key
--
-- KEYS  limits ring held asleep rates line wake watch
-- ARGV  clock key for_ms
-- Runs  limits:HGET,HMGET ring:ZADD,ZRANGE,ZREM held:ZCARD,ZLEXCOUNT asleep:ZADD,ZMSCORE,ZRANGE,ZREM,ZSCORE rates:ZSCORE
--       line:EXISTS wake:LLEN,LPUSH watch:DEL
-- Returns  1 if the key was throttled or paused before, else 0.
-- Nothing to do: if `for_ms` is 0 and the key is not throttled or paused, returns 0.
--
-- `for_ms` is for how many ms the messages of the key must not start. If it is empty, the key is paused until it is
-- resumed. If it is 0, the key is resumed. Messages of the key that already run continue.

local slept = redis.call('ZSCORE', asleep, key)
if for_ms == '0' then
  redis.call('ZREM', asleep, key)
  ring_in({ key })
else
  if for_ms == '' then redis.call('ZADD', asleep, '+inf', key) else put(asleep, now_up + for_ms, { key }) end
  redis.call('ZREM', ring, key)
end
return slept and 1 or 0
