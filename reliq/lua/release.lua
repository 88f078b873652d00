-- release: unack -> head of ready, no retry spent
--
-- KEYS  unack ready counts lease errors totals ends wake
-- ARGV  clock | id nonce left died
-- Runs  unack:ZMSCORE,ZREM ready:RPUSH counts:HDEL,HMGET lease:HDEL,HMGET,HSET errors:HDEL,HMGET totals:HINCRBY
--       ends:XADD,XTRIM wake:LLEN,LPUSH
-- Returns  the indexes of receipts that no longer hold
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `died` is as claim gave it: a suspect stays one. The first in the tail is the first to be claimed again.

local ids, held, lost = receipts()
local gone, freed, suspects, calm = {}, {}, {}, {}
for i = #ids, 1, -1 do
  local id = ids[i]
  if cancelled(held[i]) then
    gone[#gone + 1] = id
  elseif held[i] then
    local died = tonumber(arg(i, DIED))
    freed[#freed + 1] = id
    if died > 0 then
      suspects[#suspects + 1], suspects[#suspects + 2] = id, suspect(died)
    else
      calm[#calm + 1] = id
    end
  end
end

begin(unack)
if #freed > 0 then
  redis.call('RPUSH', ready, unpack(freed))
  push_token()
  if #suspects > 0 then redis.call('HSET', lease, unpack(suspects)) end
  redis.call('ZREM', unack, unpack(freed))
  if #calm > 0 then redis.call('HDEL', lease, unpack(calm)) end
end
if #gone > 0 then redis.call('ZREM', unack, unpack(gone)) end
finish('cancelled', gone)
add('released', #freed)
return lost
