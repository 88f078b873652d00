-- nack: keep failed messages in unack until their redelivery, or move them to garbage if they fail for good
--
-- KEYS  unack garbage retries_left lease errors totals ends wake watch | msg
-- ARGV  clock bare keyed | id nonce delay_ms note value key
-- Runs  unack:ZADD,ZMSCORE,ZRANGE,ZREM garbage:SADD retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET
--       totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL msg:GETRANGE,PERSIST,PEXPIRE,PTTL,SET,SETRANGE,STRLEN
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE
--       rates:ZADD,ZREM,ZSCORE ready:EXISTS retry:EXISTS line:EXISTS retries_left:HGET
-- Returns  the ids of messages with an invalid receipt, then the ids of messages that ended as cancelled.
-- Nothing to do: an invalid receipt changes nothing.
--
-- The script stores `note` (the failure) before the notes of the message's earlier failures. It does not change the
-- number of retries: `reclaim` does this when the redelivery is due.
--
-- If a message fails for good, `value` is its stored value (header and body). If Redis has already deleted the value
-- because its TTL ended, the script writes it again, because the dead letter needs it. Without `value`, a `delay_ms` of
-- -1 means that the message fails for good and has an empty body. A `delay_ms` of -2 means that it fails for good and
-- that the worker did not read its large body, which stays in Redis.

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
