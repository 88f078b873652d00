-- limit: set the limits of a queue, and let the messages start that the new limits allow
--
-- KEYS  wake watch limits ring held asleep rates line
-- ARGV  clock declared | field value
-- Runs  wake:LLEN,LPUSH watch:DEL limits:HDEL,HGET,HKEYS,HMGET,HSET ring:ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZSCAN asleep:ZADD,ZMSCORE,ZREM,ZSCAN,ZSCORE rates:ZADD,ZREM,ZSCORE
--       line:EXISTS
-- Returns  1 if the limits were written, else 0.
-- Nothing to do: if the last declaration of a worker had the same limits, returns 0.
--
-- If a worker declares limits in its code, `declared` is the fingerprint of these limits. They then replace all limits
-- of the queue, but nothing is written if the last declaration had the same fingerprint. If `declared` is empty, only
-- the limits in this script call change. An empty value removes a limit. This script checks about 1,000 of the keys
-- that the old limits blocked. Later calls of `promote` check the other keys.

if declared ~= '' and redis.call('HGET', limits, 'declared') == declared then return 0 end

local set, gone, kept, weighted = { 'on', '1', 'walk', '0 0' }, {}, { on = true, declared = true, weighted = true, walk = true }, false
for i = 1, ITEMS do
  local field, value = arg(i, FIELD), arg(i, VALUE)
  kept[field] = value ~= ''
  if value == '' then gone[#gone + 1] = field else pair(set, field, value) end
  weighted = weighted or (value ~= '' and field:find('^weight:'))
end
for _, field in ipairs(redis.call('HKEYS', limits)) do
  if declared ~= '' and not kept[field] then gone[#gone + 1] = field
  elseif kept[field] == nil and field:find('^weight:') then weighted = true end
end
if declared ~= '' then pair(set, 'declared', declared) end
if weighted then pair(set, 'weighted', '1') else gone[#gone + 1] = 'weighted' end

redis.call('HSET', limits, unpack(set))
run('HDEL', limits, gone)
redis.call('ZREM', rates, '\4')
walk_on()
redis.call('DEL', watch)
push_token()
return 1
