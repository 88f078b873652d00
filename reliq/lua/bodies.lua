-- bodies: no move; the values of messages, or their sizes where they are large
--
-- KEYS   | msg
-- ARGV  clock most inline
-- Runs  msg:GETRANGE,MGET,STRLEN
-- Returns  the values; where they have more than `inline` bytes together, the size of each instead; of a value of more
--          than `most` bytes its size and its first 16 KiB
-- Nothing to do: a message without a value is nil, or has the size 0.
--
-- Values pass through Lua, which is dear but saves a round trip: only small ones do.

local sizes, total = {}, 0
for i = 1, ITEMS do
  sizes[i] = tonumber(redis.pcall('STRLEN', body(i))) or 0
  total = total + sizes[i]
end
if total <= tonumber(inline) then return redis.call('MGET', all_bodies()) end
for i, size in ipairs(sizes) do
  if size > tonumber(most) then sizes[i] = { size, redis.call('GETRANGE', body(i), 0, 16383) } end
end
return sizes
