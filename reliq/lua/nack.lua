-- nack: let failed messages wait in unack for their redelivery, or move them to garbage
--
-- KEYS  unack garbage retries_left lease errors totals ends wake watch | msg
-- ARGV  clock bare keyed | id nonce delay_ms note value key
-- Runs  unack:ZADD,ZMSCORE,ZRANGE,ZREM garbage:SADD retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET
--       totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL msg:GETRANGE,PERSIST,PEXPIRE,PTTL,SET,SETRANGE,STRLEN
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE
--       rates:ZADD,ZREM,ZSCORE ready:EXISTS retry:EXISTS line:EXISTS retries_left:HGET
-- Returns  the ids with an invalid receipt, then the ids that ended as cancelled.
-- Nothing to do: an invalid receipt changes nothing.
--
-- The script stores `note` before the notes of earlier failures. When the redelivery is due, `reclaim` spends the
-- retry.
--
-- If a message must not run again, `value` is its value. If Redis has already deleted the body, the script restores it
-- from `value` for the dead letter. If such a message has no value, `delay_ms` is -1 for an empty body, or -2 for a
-- body that was too large to read, which stays in Redis.

local ids, held, stopped, lost, _, receipt_of = receipts()
local waiting, dues, words, buried, notes = {}, {}, {}, {}, {}
-- keyed: note_keys(receipt_of)
local known = run('HMGET', errors, ids)

begin(unack)
-- keyed: correct_costs(receipt_of)
for _, i in ipairs(held) do
  local id, delay = ids[i], tonumber(arg(i, DELAY_MS))
  pair(notes, id, failures(arg(i, NOTE), known[i]))
  if arg(i, VALUE) ~= '' or delay < 0 then
    buried[#buried + 1] = id
    local is_there = delay == -2 or (tonumber(redis.pcall('STRLEN', body(i))) or 0) > 0
    if is_there then redis.call('PERSIST', body(i)) else redis.call('SET', body(i), arg(i, VALUE)) end
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
