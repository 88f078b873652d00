-- nack: unack -> unack at the redelivery time, or garbage when no retry is left or it is rejected
--
-- KEYS  unack garbage counts lease errors totals ends wake watch | msg
-- ARGV  clock bare | id nonce left delay_ms note value
-- Runs  unack:ZADD,ZMSCORE,ZRANGE,ZREM garbage:SADD counts:HDEL,HMGET lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET
--       totals:HINCRBY ends:XADD,XTRIM wake:LLEN,LPUSH watch:DEL msg:GETRANGE,PEXPIRE,PTTL,SET,SETRANGE
-- Returns  the indexes of receipts that no longer hold, then those that ended as cancelled
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `note` is reason, attempt and error. The retry is spent when the redelivery time comes: by reclaim. A message
-- that must not run again brings its `value`, so that its letter has a body whatever its TTL; one whose body is empty
-- says so by a `delay_ms` below 0.

local function is_last(i) return arg(i, VALUE) ~= '' or tonumber(arg(i, DELAY_MS)) < 0 end

local ids, held, lost = receipts()
local gone, stopped, waiting, dues, buried, words, notes = {}, {}, {}, {}, {}, {}, {}
for i, id in ipairs(ids) do
  if cancelled(held[i]) then
    gone[#gone + 1], stopped[#stopped + 1] = id, i
  elseif held[i] then
    notes[#notes + 1], notes[#notes + 2] = id, arg(i, NOTE)
    if is_last(i) then
      buried[#buried + 1] = id
    else
      waiting[#waiting + 1], dues[#dues + 1] = id, now_up + arg(i, DELAY_MS)
      words[#words + 1], words[#words + 2] = id, 'nacked'
    end
  end
end

begin(unack)
for i in ipairs(ids) do
  if held[i] and not cancelled(held[i]) then
    local delay = tonumber(arg(i, DELAY_MS))
    if is_last(i) then redis.call('SET', body(i), arg(i, VALUE)) else postpone(body(i), delay, now_up + delay) end
  end
end
if #notes > 0 then redis.call('HSET', errors, unpack(notes)) end
if #waiting > 0 then redis.call('HSET', lease, unpack(words)) end
put(unack, dues, waiting)
if #buried > 0 then
  redis.call('SADD', garbage, unpack(buried))
  redis.call('ZREM', unack, unpack(buried))
  redis.call('HDEL', counts, unpack(buried))
  redis.call('HDEL', lease, unpack(buried))
end
if #gone > 0 then redis.call('ZREM', unack, unpack(gone)) end
finish('cancelled', gone)
add('nacked', #waiting + #buried)
return { lost, stopped }
