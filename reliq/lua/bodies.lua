-- bodies: read the values of messages, or only the sizes of large values
--
-- KEYS   | msg
-- ARGV  clock most inline
-- Runs  msg:GETRANGE,MGET,STRLEN
-- Returns  the values. If they have more than `inline` bytes in total, only the size of each value; for a value of more
--          than `most` bytes, its size and its first 16 KiB.
-- Nothing to do: a message without a value gets nil or the size 0.
--
-- Copying a value through Lua is slow, but saves a round trip. So the script returns only small values.

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
