-- ack: unack -> gone
--
-- KEYS  unack counts lease errors totals | msg dd
-- ARGV  clock kind | id nonce left window
-- Returns  the indexes of receipts that no longer hold
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `kind` is how the messages end: `acked`, or `expired` when their bodies were gone at the claim (a cancelled
-- one then ends as `cancelled`). There are dd keys when a message has a `window`: so long its id stays taken.

local ids, held, lost = receipts()
local done, bodies, stopped = {}, {}, 0
for i, id in ipairs(ids) do
  if held[i] then
    done[#done + 1], bodies[#bodies + 1] = id, body(i)
    if kind == 'expired' and cancelled(held[i]) then stopped = stopped + 1 end
  end
end
if #done > 0 then
  redis.call('ZREM', unack, unpack(done))
  forget(done)
  redis.call('UNLINK', unpack(bodies))
end
for i in ipairs(ids) do
  local window = arg(i, WINDOW)
  if held[i] and window ~= '' then redis.pcall('SET', mark(i), 'ended', 'PX', window) end
end
add(kind, #done - stopped)
add('cancelled', stopped)
return lost
