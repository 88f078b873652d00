-- remap: replace the map of the queue's shards
--
-- KEYS  map limits
-- ARGV  clock before after
-- Runs  map:GET,SET limits:EXISTS
-- Returns  the map after the call; `keyed` if the map would give several shards to a queue with keys or limits.
-- Nothing to do: returns the current map, if it is not `before`.

local shards = tonumber(after:match('"n":(%d+)') or 1)
if shards > 1 and redis.call('EXISTS', limits) == 1 then return 'keyed' end
if (read('GET', map) or '') == before then redis.call('SET', map, after) end
return redis.call('GET', map) or ''
