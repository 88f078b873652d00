-- reclaim: unack -> retry, unack -> garbage
--
-- KEYS  unack retry garbage counts lease errors totals ends wake
-- ARGV  clock limit spare most
-- Runs  unack:ZADD,ZRANGE,ZRANGEBYSCORE,ZREM retry:LPUSH garbage:SADD counts:HDEL,HMGET,HSET lease:HDEL,HMGET,HSET
--       errors:HDEL,HMGET,HSET totals:HINCRBY ends:XADD,XTRIM wake:LLEN,LPUSH
-- Returns  ms until the next deadline (-1: none), the ids whose lease ran out (suspects, if it was one of reliq's),
--          the ids that have waited and are due again, the ids with no delivery left, the ids that were cancelled,
--          and those whose count was missing or no number
-- Nothing to do: that wait and empty lists.
--
-- A message that had not ended when its lease ran out may be what killed its worker. After its first death it goes on
-- at once; after the next ones it waits in unack, longer each time; the death number `most` in a row buries it. One
-- without a state word was leased by a consumer that writes none: it goes on at once, and is no suspect.
--
-- With `spare` set none of reliq's leases ends that is over: it may be about to be renewed. At most nine times `limit`
-- of such leases are passed over to find what is behind them.

local ids, at = {}, 0
repeat
  local part = redis.call('ZRANGEBYSCORE', unack, '-inf', score(now_down), 'LIMIT', at, limit)
  local words = spare ~= '' and #part > 0 and redis.call('HMGET', lease, unpack(part))
  for i, id in ipairs(part) do
    if not words or not words[i] or waits(words[i]) or cancelled(words[i]) then ids[#ids + 1] = id end
  end
  at = at + limit
until #ids > 0 or #part == 0 or at >= 10 * limit
local overdue, again, buried, gone, odd = {}, {}, {}, {}, {}
local back, spent, words_of, known, notes_of, waiting, nacked = {}, {}, {}, {}, {}, {}, 0
if #ids > 0 then
  local words, lefts = redis.call('HMGET', lease, unpack(ids)), redis.call('HMGET', counts, unpack(ids))
  local notes = redis.call('HMGET', errors, unpack(ids))
  for i, id in ipairs(ids) do
    local word, left, waited = words[i], count(lefts[i]), waits(words[i])
    local died = word and deaths(word) + (waited and 0 or 1) or 0
    if not (lefts[i] and lefts[i]:match('^-?%d+$')) then odd[#odd + 1] = id end
    if cancelled(word) then
      gone[#gone + 1] = id
    elseif left <= 0 or died >= tonumber(most) then
      local text = (notes[i] or ''):match('^%S+ %S+ (.*)$') or ''
      if word ~= 'nacked' then notes_of[#notes_of + 1], notes_of[#notes_of + 2] = id, 'lease - ' .. text end
      buried[#buried + 1], known[#known + 1] = id, id
    elseif died > 1 and not waited then
      overdue[#overdue + 1] = id
      waiting[#waiting + 1], waiting[#waiting + 2] = score(now_up + 1000 * 2 ^ (died - 1)), id
      words_of[#words_of + 1], words_of[#words_of + 2] = id, suspect(died)
    else
      local where = waited and again or overdue
      where[#where + 1], back[#back + 1] = id, id
      spent[#spent + 1], spent[#spent + 2] = id, left - 1
      if word == 'nacked' then nacked = nacked + 1 end
      if died > 0 then
        words_of[#words_of + 1], words_of[#words_of + 2] = id, suspect(died)
      else
        known[#known + 1] = id
      end
    end
  end

  begin(unack)
  if #back > 0 then
    redis.call('LPUSH', retry, unpack(back))
    redis.call('HSET', counts, unpack(spent))
    push_token()
  end
  if #words_of > 0 then redis.call('HSET', lease, unpack(words_of)) end
  if #notes_of > 0 then redis.call('HSET', errors, unpack(notes_of)) end
  if #buried > 0 then redis.call('SADD', garbage, unpack(buried)) end
  if #waiting > 0 then redis.call('ZADD', unack, unpack(waiting)) end
  for _, part in ipairs({ back, buried, gone }) do
    if #part > 0 then redis.call('ZREM', unack, unpack(part)) end
  end
  if #buried > 0 then redis.call('HDEL', counts, unpack(buried)) end
  if #known > 0 then redis.call('HDEL', lease, unpack(known)) end
  finish('cancelled', gone)
  add('retried_lease', #overdue)
  add('retried_nack', nacked)
end
return { wait_for(unack), overdue, again, buried, gone, odd }
