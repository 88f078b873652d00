-- held_up: the first messages of keys that wait and have no turn: they sleep, or their places are taken
--
-- KEYS  ring held asleep line
-- ARGV  clock most | key
-- Runs  ring:ZSCORE held:ZRANDMEMBER asleep:ZRANGE line:LINDEX
-- Returns  for each such key its name, and the id of its first message: of the keys that are named, of `most` that sleep
--   longest, and of those that have `most` of the places, drawn at random
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
