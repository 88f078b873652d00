-- counts: how many are where, and every total, at one moment
--
-- KEYS  pending ready unack retry garbage dead totals paused
-- ARGV  clock
-- Returns  pending, ready, unack, retry, garbage, dead, paused (1 or 0), then each total's name and number
-- Nothing to do: zeros.

local sizes = { 'ZCARD', 'LLEN', 'ZCARD', 'LLEN', 'SCARD', 'XLEN', 'EXISTS' }
local reply = {}
for i, command in ipairs(sizes) do reply[i] = redis.call(command, ({ pending, ready, unack, retry, garbage, dead, paused })[i]) end
local kinds = redis.call('HGETALL', totals)
for i = 1, #kinds do reply[#reply + 1] = kinds[i] end
return reply
