-- ack: unack -> gone
--
-- KEYS  unack counts lease errors totals ends history | msg dd
-- ARGV  clock kind history_max took_ms | id nonce left window
-- Returns  the indexes of receipts that no longer hold
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `kind` is how the messages end: `acked`, or `expired` when their bodies were gone at the claim (a cancelled
-- one then ends as `cancelled`). There are dd keys when a message has a `window`: so long its id stays taken.
-- With `history_max` so many acked ones are remembered; `took_ms` is then how long each ran, with commas between.

local ids, held, lost = receipts()
local done, bodies, took, gone, stopped = {}, {}, {}, {}, {}
local next_took = took_ms:gmatch('%d+')
for i, id in ipairs(ids) do
  local ms = took_ms ~= '' and next_took() or ''
  if held[i] then
    done[#done + 1], bodies[#bodies + 1], took[#took + 1] = id, body(i), ms
    if kind == 'expired' then
      local where = cancelled(held[i]) and stopped or gone
      where[#where + 1] = id
    end
  end
end

if #done > 0 then
  begin(unack)
  for i in ipairs(ids) do
    local window = arg(i, WINDOW)
    if held[i] and window ~= '' then redis.pcall('SET', mark(i), 'ended', 'PX', window) end
  end
  redis.call('ZREM', unack, unpack(done))
  if kind == 'acked' then forget(done) end
  finish('expired', gone)
  finish('cancelled', stopped)
  redis.call('UNLINK', unpack(bodies))
end
if kind == 'acked' then
  add(kind, #done)
  if history_max ~= '' then note_ends(history, tonumber(history_max), kind, done, took) end
end
return lost
