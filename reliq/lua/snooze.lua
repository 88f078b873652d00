-- snooze: move running messages to pending until a later time, without spending a retry
--
-- KEYS  unack pending retries_left lease errors totals ends wake watch | msg
-- ARGV  clock bare keyed | id nonce delay_ms key
-- Runs  unack:ZMSCORE,ZREM pending:ZADD,ZRANGE retries_left:HDEL lease:HDEL,HMGET errors:HDEL,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH watch:DEL msg:GETRANGE,PEXPIRE,PTTL,SETRANGE
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE
--       rates:ZADD,ZREM,ZSCORE ready:EXISTS retry:EXISTS line:EXISTS retries_left:HGET
-- Returns  the ids of messages with an invalid receipt, then the ids of messages that ended as cancelled.
-- Nothing to do: an invalid receipt changes nothing.

local ids, held, stopped, lost, _, receipt_of = receipts()
local put_off, dues = {}, {}
-- keyed: note_keys(receipt_of)

begin(unack)
-- keyed: correct_costs(receipt_of)
for j, i in ipairs(held) do
  local delay = tonumber(arg(i, DELAY_MS))
  put_off[j], dues[j] = ids[i], now_up + delay
  postpone(body(i), delay, dues[j])
end
put(pending, dues, put_off)
run('ZREM', unack, put_off)
run('HDEL', lease, put_off)
stop(stopped)
add('snoozed', #held)
-- keyed: free_places(stopped) stand_by(put_off)
return { lost, stopped }
