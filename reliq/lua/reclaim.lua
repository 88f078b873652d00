-- reclaim: unack -> retry, unack -> garbage
--
-- KEYS  unack retry garbage retries_left lease errors totals ends wake msg
-- ARGV  clock limit spare most
-- Runs  unack:ZADD,ZRANGE,ZRANGEBYSCORE,ZREM retry:LPUSH garbage:SADD retries_left:HDEL,HMGET,HSET
--       lease:HDEL,HMGET,HSET errors:HDEL,HMGET,HSET totals:HINCRBY ends:XADD wake:LLEN,LPUSH msg:PERSIST
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS retry:EXISTS line:EXISTS,RPUSH
-- Returns  ms until the next deadline (-1: none), the ids with an expired lease (suspects, if reliq leased them),
--          the ids that are due again after a wait, the ids without retries left, the cancelled ids,
--          and the ids with an invalid or missing retry count
-- Nothing to do: that time and empty lists.
--
-- A message with an expired lease may have killed its worker. After its first death it is redelivered immediately.
-- After the next deaths it waits in unack, longer each time. After `most` deaths in a row it goes to garbage. A message
-- without a state word was leased by a foreign consumer: it is redelivered immediately and does not become a suspect.
--
-- With `spare`, expired leases of reliq are skipped, because they may be about to be renewed. Messages behind them are
-- searched among the first ten times `limit` ids.
--
-- The caller cannot name the messages that go to garbage in advance, so `msg` is the prefix of the bodies' keys. A body
-- in garbage has no TTL: it is kept until the dead letter is written.

local reach = spare == '' and limit or 10 * limit
local part = redis.call('ZRANGEBYSCORE', unack, '-inf', score(now_down), 'LIMIT', 0, reach)
local all_words, all_lefts, ids, words, lefts = run('HMGET', lease, part), run('HMGET', retries_left, part), {}, {}, {}
for i, id in ipairs(part) do
  local word = all_words[i]
  local may_end = spare == '' or not word or waits(word) or cancelled(word)
  if may_end and #ids < tonumber(limit) then
    ids[#ids + 1], words[#ids + 1], lefts[#ids + 1] = id, word, all_lefts[i]
    -- keyed: key_of[id], lefts[#ids] = key_in(all_lefts[i]), left_in(all_lefts[i])
  end
end

local overdue, again, buried, gone, odd, nacked = {}, {}, {}, {}, {}, 0
-- keyed: local held_back = {}
local back, spent, calm, suspects, waiting, notes = {}, {}, {}, {}, {}, {}
local known = run('HMGET', errors, ids)
for i, id in ipairs(ids) do
  local word, left, waited = words[i], count(lefts[i]), waits(words[i])
  local died = word and deaths(word) + (waited and 0 or 1) or 0
  local is_last, note = left == 0 or died >= tonumber(most), known[i] or ''
  -- A death is stored immediately.
  local is_new = (not waited and word) or (is_last and word ~= 'nacked' and not note:find('^lease '))
  if is_new and not cancelled(word) then
    pair(notes, id, failures('lease - ' .. (note:match('^%S+ %S+ ([^\29-\31]*)') or ''), note))
  end
  if not (lefts[i] or ''):find('^-?%d+$') then odd[#odd + 1] = id end
  if cancelled(word) then
    gone[#gone + 1] = id
  elseif is_last then
    buried[#buried + 1], calm[#calm + 1] = id, id
  else
    local where = waited and again or overdue
    where[#where + 1] = id
    if died > 0 then pair(suspects, id, suspect(died)) else calm[#calm + 1] = id end
    if died > 1 and not waited then
      pair(waiting, score(now_up + 1000 * 2 ^ (died - 1)), id)
      -- keyed: held_back[#held_back + 1] = id
    else
      back[#back + 1] = id
      pair(spent, id, left - 1)
      -- keyed: spent[#spent] = counted(left - 1, key_of[id])
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
add('retried_lease', #overdue)
add('retried_nack', nacked)
return { wait_for(unack), overdue, again, buried, gone, odd }
