-- release: unack -> head of ready, no retry spent
--
-- KEYS  unack ready counts lease errors totals ends wake
-- ARGV  clock | id nonce left flag
-- Returns  the indexes of receipts that no longer hold
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `flag` is as claim gave it: a suspect stays one. The first in the tail is the first to be claimed again.

local ids, held, lost = receipts()
local gone, freed = {}, 0
for i = #ids, 1, -1 do
  local id = ids[i]
  if held[i] then redis.call('ZREM', unack, id) end
  if cancelled(held[i]) then
    gone[#gone + 1] = id
  elseif held[i] then
    redis.call('HDEL', lease, id)
    if arg(i, FLAG) == 'suspect' then redis.call('HSET', lease, id, 'suspect') end
    redis.call('RPUSH', ready, id)
    freed = freed + 1
  end
end
if freed > 0 then push_token() end
finish('cancelled', gone)
add('released', freed)
return lost
