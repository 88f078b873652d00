-- limit: the limits of a queue -> other limits; keys that may be served by them -> ring
--
-- KEYS  wake watch limits ring held asleep rates line
-- ARGV  clock declared | field value
-- Runs  wake:LLEN,LPUSH watch:DEL limits:HDEL,HGET,HKEYS,HMGET,HSET ring:ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZRANGEBYLEX asleep:ZMSCORE,ZRANGE,ZREM,ZSCORE rates:ZSCORE
--       line:EXISTS
-- Returns  1 when they were written, else 0
-- Nothing to do: 0, when they are those of a declaration that was written before.
--
-- With `declared` they take the place of all others, unless the last ones written so were the same; else those alone
-- are written that are named. An empty value removes one. Of 1,000 keys at most it finds out whether they may be
-- served again; `tidy` finds others.

if declared ~= '' and redis.call('HGET', limits, 'declared') == declared then return 0 end

local set, gone, kept, weighted, before = { 'on', '1' }, {}, { on = true, declared = true, weighted = true }, false, limits_now()
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

-- What had no place under the old limits, and what sleeps for its old rate, is looked at by the new ones.
local some, at = {}, '-'
for _ = 1, 1000 do
  local member = redis.call('ZRANGEBYLEX', held, at, '+', 'LIMIT', 0, 1)[1]
  if not member then break end
  local key = member:match('^[^%z]*')
  at, some[#some + 1] = '[' .. key .. '\1', key
end
for _, key in ipairs(redis.call('ZRANGE', asleep, 0, 999)) do
  if sleeps_for(before, redis.call('ZSCORE', rates, key), redis.call('ZSCORE', asleep, key)) then
    redis.call('ZREM', asleep, key)
    some[#some + 1] = key
  end
end
limits_read = nil
ring_in(some)
redis.call('DEL', watch)
push_token()
return 1
