-- remap: a map of the shards -> the next map
--
-- KEYS  map
-- ARGV  clock before after
-- Runs  map:GET,SET
-- Returns  the map that is there then
-- Nothing to do: the map that is there, when it is another than `before`.

if (read('GET', map) or '') == before then redis.call('SET', map, after) end
return redis.call('GET', map) or ''
