-- remap: a map of the shards -> the next map
--
-- KEYS  map limits
-- ARGV  clock before after
-- Runs  map:GET,SET limits:EXISTS
-- Returns  the map that is there then; `keyed` when it would give several shards to a queue with keys or limits
-- Nothing to do: the map that is there, when it is another than `before`.

local shards = tonumber(after:match('"n":(%d+)') or 1)
if shards > 1 and redis.call('EXISTS', limits) == 1 then return 'keyed' end
if (read('GET', map) or '') == before then redis.call('SET', map, after) end
return redis.call('GET', map) or ''
