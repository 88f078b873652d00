-- nack: unack -> unack until the redelivery time, or garbage if no retry is left or the message is rejected
--
-- KEYS  unack garbage retries_left lease errors totals ends wake watch | msg
-- ARGV  clock bare keyed | id nonce delay_ms note value key
-- Runs  unack:ZADD,ZMSCORE,ZRANGE,ZREM garbage:SADD retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET
--       totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL msg:GETRANGE,PERSIST,PEXPIRE,PTTL,SET,SETRANGE
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS retry:EXISTS line:EXISTS
-- Returns  the ids with an invalid receipt, then the ids that ended as cancelled
-- Nothing to do: an invalid receipt changes nothing.
--
-- `note` is stored before the notes of earlier failures. The retry is spent at the redelivery time, by reclaim. A
-- message that must not run again is given with its `value`, so that its letter has a body even after its TTL. Without
-- a value, `delay_ms` is -1 for an empty body, or -2 for a body that was too large to read and stays as it is.

local ids, held, stopped, lost, _, receipt_of = receipts()
local waiting, dues, words, buried, notes = {}, {}, {}, {}, {}
-- keyed: note_keys(receipt_of)
local known = run('HMGET', errors, ids)

begin(unack)
for _, i in ipairs(held) do
  local id, delay = ids[i], tonumber(arg(i, DELAY_MS))
  pair(notes, id, failures(arg(i, NOTE), known[i]))
  if arg(i, VALUE) ~= '' or delay < 0 then
    buried[#buried + 1] = id
    if delay == -2 then redis.call('PERSIST', body(i)) else redis.call('SET', body(i), arg(i, VALUE)) end
  else
    waiting[#waiting + 1], dues[#dues + 1] = id, now_up + delay
    pair(words, id, 'nacked')
    postpone(body(i), delay, now_up + delay)
  end
end
run('HSET', errors, notes)
run('HSET', lease, words)
put(unack, dues, waiting)
run('SADD', garbage, buried)
run('ZREM', unack, buried)
run('HDEL', retries_left, buried)
run('HDEL', lease, buried)
stop(stopped)
add('nacked', #held)
-- keyed: free_places(stopped) free_places(buried) stand_by(waiting)
return { lost, stopped }
