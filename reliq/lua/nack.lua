-- nack: unack -> unack at the redelivery time, or garbage when no retry is left or it is rejected
--
-- KEYS  unack garbage retries_left lease errors totals ends wake watch | msg
-- ARGV  clock bare keyed | id nonce delay_ms note value key
-- Runs  unack:ZADD,ZMSCORE,ZRANGE,ZREM garbage:SADD retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET
--       totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL msg:GETRANGE,PERSIST,PEXPIRE,PTTL,SET,SETRANGE
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS retry:EXISTS line:EXISTS
-- Returns  the ids whose receipt no longer holds, then those that ended as cancelled
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `note` goes before those of earlier failures. The retry is spent when the redelivery time comes: by reclaim. A message
-- that must not run again brings its `value`, so that its letter has a body whatever its TTL. Without one it says so by
-- a `delay_ms` of -1: its body is empty; or of -2: its body was too large to be read, and stays as it is.

local ids, held, stopped, lost, _, receipt_of = receipts()
local waiting, dues, words, buried, notes = {}, {}, {}, {}, {}
-- keyed: know(receipt_of)
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
