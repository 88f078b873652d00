-- snooze: unack -> pending, no retry spent
--
-- KEYS  unack pending counts lease errors totals ends wake watch | msg
-- ARGV  clock bare | id nonce left delay_ms
-- Runs  unack:ZADD,ZMSCORE,ZRANGE,ZREM pending:ZADD,ZRANGE,ZREM counts:HDEL,HMGET lease:HDEL,HMGET
--       errors:HDEL,HMGET totals:HINCRBY ends:XADD,XTRIM wake:LLEN,LPUSH watch:DEL
--       msg:GETRANGE,PEXPIRE,PTTL,SETRANGE
-- Returns  the indexes of receipts that no longer hold, then those that ended as cancelled
-- Nothing to do: a receipt that does not hold changes nothing.

local ids, held, lost = receipts()
local gone, stopped, put_off, dues = {}, {}, {}, {}
for i, id in ipairs(ids) do
  if cancelled(held[i]) then
    gone[#gone + 1], stopped[#stopped + 1] = id, i
  elseif held[i] then
    put_off[#put_off + 1], dues[#dues + 1] = id, now_up + arg(i, DELAY_MS)
  end
end

begin(unack)
for i in ipairs(ids) do
  local delay = tonumber(arg(i, DELAY_MS))
  if held[i] and not cancelled(held[i]) then postpone(body(i), delay, now_up + delay) end
end
put(pending, dues, put_off)
if #put_off > 0 then
  redis.call('ZREM', unack, unpack(put_off))
  redis.call('HDEL', lease, unpack(put_off))
end
if #gone > 0 then redis.call('ZREM', unack, unpack(gone)) end
finish('cancelled', gone)
add('snoozed', #put_off)
return { lost, stopped }
