-- ack: unack -> gone
--
-- KEYS  unack counts lease errors totals ends history windows | msg dd
-- ARGV  clock kind history_max took_ms | id nonce left window
-- Runs  unack:ZMSCORE,ZREM counts:HDEL,HMGET lease:HDEL,HMGET errors:HDEL,HMGET totals:HINCRBY ends:XADD,XTRIM
--       history:XADD,XTRIM windows:HDEL,HMGET msg:UNLINK dd:SET
-- Returns  the indexes of receipts that no longer hold
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `kind` is how the messages end: `acked`, or `expired` when their bodies were gone at the claim (a cancelled
-- one then ends as `cancelled`). There are dd keys when an id may be a chosen one: it stays taken then,
-- for as long as its publish said, or for `window` when nothing says so any more.
-- With `history_max` so many acked ones are remembered; `took_ms` is then how long each ran, with commas between.

local ids, held, lost = receipts()
local done, bodies, took, gone, stopped, taken, at, spans = {}, {}, {}, {}, {}, {}, {}, {}
local next_took = took_ms:gmatch('%d+')
for i, id in ipairs(ids) do
  local ms = took_ms ~= '' and next_took() or ''
  if held[i] then
    done[#done + 1], bodies[#bodies + 1], took[#took + 1] = id, body(i), ms
    if kind == 'expired' then
      local where = cancelled(held[i]) and stopped or gone
      where[#where + 1] = id
    end
    if kind == 'acked' or not cancelled(held[i]) then
      taken[#taken + 1], at[#at + 1], spans[#spans + 1] = id, i, arg(i, WINDOW)
    end
  end
end

if #done > 0 then
  begin(unack)
  take(taken, at, spans)
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
