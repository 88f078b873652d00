-- limit: the limits of a queue -> other limits; keys that may now be served -> ring
--
-- KEYS  wake watch limits ring held asleep rates line
-- ARGV  clock declared | field value
-- Runs  wake:LLEN,LPUSH watch:DEL limits:HDEL,HGET,HKEYS,HMGET,HSET ring:ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZSCAN asleep:ZADD,ZMSCORE,ZREM,ZSCAN,ZSCORE rates:ZADD,ZSCORE
--       line:EXISTS
-- Returns  1 if the limits were written, else 0
-- Nothing to do: 0, if the last declaration had the same limits.
--
-- With `declared`, the limits replace all others, unless the last declaration was the same. Otherwise only the given
-- limits are written; an empty value removes a limit. The call checks some 1,000 keys for whether they may be served
-- again. Following promotes check the others.

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
walk_on()
redis.call('DEL', watch)
push_token()
return 1
