-- extend: unack -> unack with a new deadline
--
-- KEYS  unack counts lease
-- ARGV  clock lease_ms | id nonce left
-- Runs  unack:ZADD,ZMSCORE,ZREM counts:HMGET lease:HMGET
-- Returns  the indexes of receipts that no longer hold, then those whose message was cancelled
-- Nothing to do: a receipt that does not hold changes nothing.

local ids, held, lost = receipts()
local stopped, deadlines = {}, {}
for i, id in ipairs(ids) do
  if held[i] then
    deadlines[#deadlines + 1], deadlines[#deadlines + 2] = score(now_up + lease_ms), id
    if cancelled(held[i]) then stopped[#stopped + 1] = i end
  end
end
if #deadlines > 0 then
  begin(unack)
  redis.call('ZADD', unack, unpack(deadlines))
end
return { lost, stopped }
