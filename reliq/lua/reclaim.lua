-- reclaim: redeliver messages in unack whose lease has expired or whose backoff has ended, or move them to garbage
--
-- KEYS  unack retry garbage retries_left lease errors totals ends wake msg
-- ARGV  clock limit spare most
-- Runs  unack:ZADD,ZRANGE,ZRANGEBYSCORE,ZREM retry:LPUSH garbage:SADD retries_left:HDEL,HMGET,HSET
--       lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET totals:HINCRBY ends:XADD wake:LLEN,LPUSH msg:PERSIST
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS retry:EXISTS line:EXISTS,RPUSH msg:GETRANGE
-- Returns  the ms until the next deadline in unack (-1: there is none), then five lists of ids: messages whose lease
--          has expired; messages whose backoff has ended; messages that moved to garbage; messages that ended as
--          cancelled; and messages with an invalid or missing retry count.
-- Nothing to do: if no deadline has passed, returns the ms until the next deadline and empty lists.
--
-- A message with an expired lease may have killed its worker process, so this counts as a death of the message. After
-- the first death, the message is redelivered immediately. After each further death, it waits in `unack` before its
-- redelivery, longer each time. After `most` deaths in a row, it moves to `garbage`. A message without a state word was
-- leased by a consumer in Go. It is redelivered immediately, and its expired lease does not count as a death.
--
-- With `spare`, the script skips messages with expired leases, because their workers may renew the leases after an
-- outage. It does not skip leases of 0 ms, which the supervisor writes for dead worker processes. The script then reads
-- ten times `limit` ids.
--
-- The caller does not know in advance which messages will move to `garbage`, so `msg` is not a Redis key but the prefix
-- of the Redis keys of all bodies. The script removes the TTL of the bodies of messages in `garbage`, because Redis
-- must keep these bodies until `collect` writes the dead letters.

local reach = spare == '' and limit or 10 * limit
local part = redis.call('ZRANGEBYSCORE', unack, '-inf', score(now_down), 'LIMIT', 0, reach)
local all_words, all_lefts, ids, words, lefts = run('HMGET', lease, part), run('HMGET', retries_left, part), {}, {}, {}
-- keyed: local lines = {}
for i, id in ipairs(part) do
  local word = all_words[i]
  local may_end = spare == '' or not word or waits(word) or cancelled(word) or word:find(':0', 1, true)
  if may_end and #ids < tonumber(limit) then
    ids[#ids + 1], words[#ids + 1], lefts[#ids + 1] = id, word, all_lefts[i]
    -- keyed: key_of[id], lines[id], lefts[#ids] = key_in(all_lefts[i]), line_in(all_lefts[i]), left_in(all_lefts[i])
  end
end

local overdue, again, buried, gone, odd, nacked = {}, {}, {}, {}, {}, 0
-- keyed: local held_back, old_keys, over = {}, {}, {}
local back, spent, calm, suspects, waiting, notes, stopped = {}, {}, {}, {}, {}, {}, {}
local known = run('HMGET', errors, ids)
for i, id in ipairs(ids) do
  local word, left, waited = words[i], count(lefts[i]), waits(words[i])
  local died, due, fresh = word and deaths(word) + (waited and 0 or 1) or 0, heir(word)
  -- If the message has a successor, publish the successor under the same id, with its own retries, key and cost. The
  -- deaths of the message also count for the successor, but at most `most` - 1, so that it does not move to `garbage`.
  if fresh then left, died = fresh + 1, math.min(died, most - 1) end
  -- keyed: if fresh then old_keys[id], lines[id] = key_of[id], line_of_value(redis.pcall('GETRANGE', msg .. id, 0, 16383)) end
  -- keyed: key_of[id] = key_of_line(lines[id])
  local is_last, note = left == 0 or died >= tonumber(most), known[i] or ''
  -- Add the expired lease to the failures of the message now, even if the message is redelivered later.
  local is_new = (not waited and word) or (is_last and word ~= 'nacked' and not note:find('^lease '))
  if is_new and not cancelled(word) then
    pair(notes, id, failures('lease - ' .. (note:match('^%S+ %S+ ([^\29-\31]*)') or ''), note))
  end
  if not (lefts[i] or ''):find('^-?%d+$') then odd[#odd + 1] = id end
  if cancelled(word) and fresh then stopped[#stopped + 1] = id end
  if cancelled(word) and not fresh then
    gone[#gone + 1] = id
  elseif is_last then
    buried[#buried + 1], calm[#calm + 1] = id, id
  else
    local where = waited and again or overdue
    where[#where + 1] = id
    if died > 0 then pair(suspects, id, suspect(died)) else calm[#calm + 1] = id end
    local until_then = math.max(died > 1 and not waited and now_up + 1000 * 2 ^ (died - 1) or 0, tonumber(due or 0))
    if until_then > now_up then
      pair(waiting, score(until_then), id)
      if fresh then pair(spent, id, left) end
      -- keyed: if fresh then spent[#spent] = counted(left, lines[id]) end
      -- keyed: if not fresh then held_back[#held_back + 1] = id end
    else
      back[#back + 1] = id
      pair(spent, id, left - 1)
      -- keyed: spent[#spent] = counted(left - 1, lines[id])
      nacked = nacked + (word == 'nacked' and 1 or 0)
    end
  end
end

begin(unack)
redeliver(back)
run('HSET', retries_left, spent)
run('HSET', lease, suspects)
run('HSET', errors, notes)
for _, id in ipairs(buried) do redis.pcall('PERSIST', msg .. id) end
run('SADD', garbage, buried)
run('ZADD', unack, waiting)
run('ZREM', unack, back)
run('ZREM', unack, buried)
run('HDEL', retries_left, buried)
run('HDEL', lease, calm)
stop(gone)
-- keyed: free_places(back) free_places(buried) free_places(gone) stand_by(held_back)
-- keyed: for id, key in pairs(old_keys) do key_of[id], over[#over + 1] = key, id end
-- keyed: free_places(over)
add('retried_lease', #overdue)
add('retried_nack', nacked)
add('published', #stopped)
count_ends('cancelled', stopped)
return { wait_for(unack), overdue, again, buried, gone, odd }
