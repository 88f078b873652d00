-- find: bodies that no message claims, in a piece of the key space
--
-- KEYS  counts garbage
-- ARGV  clock cursor pattern prefix
-- Returns  the next cursor (`0`: that was all), then the ids of bodies without a retry count
-- Nothing to do: a cursor.

local part = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', 1000)
local reply = { part[1] }
for _, key in ipairs(part[2]) do
  local id = key:sub(#prefix + 1)
  if redis.call('HEXISTS', counts, id) == 0 and redis.call('SISMEMBER', garbage, id) == 0 then reply[#reply + 1] = id end
end
return reply
