-- remap: change the shard map of a queue, which defines its shards
--
-- KEYS  map limits
-- ARGV  clock before after
-- Runs  map:GET,SET limits:EXISTS
-- Returns  the shard map after this script; `keyed` if the queue has keys or limits, and `after` has several shards.
-- Nothing to do: if the current shard map is not `before`, returns the current shard map.

local shards = tonumber(after:match('"n":(%d+)') or 1)
if shards > 1 and redis.call('EXISTS', limits) == 1 then return 'keyed' end
if (read('GET', map) or '') == before then redis.call('SET', map, after) end
return redis.call('GET', map) or ''
