-- snooze: unack -> pending, no retry spent
--
-- KEYS  unack pending counts lease errors totals ends wake watch | msg
-- ARGV  clock bare | id nonce left delay_ms
-- Returns  the indexes of receipts that no longer hold, then those that ended as cancelled
-- Nothing to do: a receipt that does not hold changes nothing.

local ids, held, lost = receipts()
local gone, stopped, put_off = {}, {}, 0
for i, id in ipairs(ids) do
  local delay = tonumber(arg(i, DELAY_MS))
  if held[i] then redis.call('ZREM', unack, id) end
  if cancelled(held[i]) then
    gone[#gone + 1], stopped[#stopped + 1] = id, i
  elseif held[i] then
    put(pending, now_up + delay, { id })
    redis.call('HDEL', lease, id)
    postpone(body(i), delay, now_up + delay)
    put_off = put_off + 1
  end
end
finish('cancelled', gone)
add('snoozed', put_off)
return { lost, stopped }
