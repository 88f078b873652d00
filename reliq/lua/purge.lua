-- purge: pending, ready, retry or garbage -> gone
--
-- KEYS  pending ready retry garbage counts lease errors totals | msg
-- ARGV  clock state | id
-- Returns  how many were purged
-- Nothing to do: 0.
--
-- From a list only its oldest ids, in order, and only as far as they are still the oldest.

local lists = { ready = ready, retry = retry }
local gone, bodies = {}, {}
local oldest = lists[state] and ITEMS > 0 and redis.call('LRANGE', lists[state], -ITEMS, -1) or {}
for i = 1, ITEMS do
  local id, met = arg(i, ID), nil
  if state == 'pending' then
    met = redis.call('ZREM', pending, id) == 1
  elseif state == 'garbage' then
    met = redis.call('SREM', garbage, id) == 1
  elseif #gone == i - 1 then
    met = oldest[#oldest - i + 1] == id
  end
  if met then gone[#gone + 1], bodies[#bodies + 1] = id, body(i) end
end
if #gone > 0 then
  if lists[state] then redis.call('LTRIM', lists[state], 0, -#gone - 1) end
  forget(gone)
  redis.call('UNLINK', unpack(bodies))
end
add('purged', #gone)
return #gone
