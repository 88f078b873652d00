-- held_up: no move; the first message of each key that waits without a turn, because the key sleeps or is saturated
--
-- KEYS  ring held asleep line
-- ARGV  clock most | key
-- Runs  ring:ZSCORE held:ZRANDMEMBER asleep:ZRANGE line:LINDEX
-- Returns  name and first message id of such keys: of the given keys, of the `most` keys that sleep longest, and of the
--   keys of `most` random places that are taken
-- Nothing to do: nothing.

local met, answer = {}, {}
local function meet(key)
  local first = key and not met[key] and redis.call('LINDEX', line .. key, -1)
  if key then met[key] = true end
  if first and not redis.call('ZSCORE', ring, key) then pair(answer, key, first) end
end
for i = 1, ITEMS do meet(arg(i, KEY)) end
for _, key in ipairs(redis.call('ZRANGE', asleep, 0, most - 1, 'REV')) do meet(key) end
for _, member in ipairs(redis.call('ZRANDMEMBER', held, most)) do meet(member:match('^(.-)%z')) end
return answer
