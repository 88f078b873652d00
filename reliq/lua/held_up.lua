-- held_up: find the first waiting message of each key whose messages cannot start now
--
-- KEYS  ring held asleep line
-- ARGV  clock most | key
-- Runs  ring:ZSCORE held:ZRANDMEMBER asleep:ZRANGE line:LINDEX
-- Returns  the key and the id of its first message, for each key that is throttled, paused or at its concurrency limit.
--          The script checks the given keys, the `most` keys whose throttling ends last, and the keys of `most` random
--          running messages.
-- Nothing to do: if no messages with keys wait, returns an empty list.

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
