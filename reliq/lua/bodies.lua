-- bodies: read stored messages (header and body), or only their sizes if they are large
--
-- KEYS   | msg
-- ARGV  clock most inline
-- Runs  msg:GETRANGE,MGET,STRLEN
-- Returns  the values of the messages (header and body). If they have more than `inline` bytes in total, only the size
--          of each value. For a value of more than `most` bytes, then also its first 16 KiB.
-- Nothing to do: for a message that Redis does not have, returns nil or the size 0.
--
-- A script is slow to return large values, because Lua copies them. But to return the values instead of their sizes
-- saves the client a second command. So the script returns the values only if they are small.

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
