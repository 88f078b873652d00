-- reclaim: unack -> retry, unack -> garbage
--
-- KEYS  unack retry garbage counts lease errors totals ends wake
-- ARGV  clock limit spare
-- Returns  ms until the next deadline (-1: none), the ids whose lease ran out (suspects, if it was one of reliq's),
--          the nacked ids that are due again, the ids with no retry left, the ids that were cancelled,
--          and those whose count was missing or no number
-- Nothing to do: that wait and empty lists.
--
-- With `spare` set reliq's leases do not move: one that is over may be about to be renewed. At most
-- nine times `limit` of such leases are passed over to find what is behind them.

local ids, at = {}, 0
repeat
  local part = redis.call('ZRANGEBYSCORE', unack, '-inf', score(now_down), 'LIMIT', at, limit)
  local words = spare ~= '' and #part > 0 and redis.call('HMGET', lease, unpack(part))
  for i, id in ipairs(part) do
    if not words or not words[i] or words[i] == 'nacked' or cancelled(words[i]) then ids[#ids + 1] = id end
  end
  at = at + limit
until #ids > 0 or #part == 0 or at >= 10 * limit
local overdue, again, buried, gone, odd = {}, {}, {}, {}, {}
local back, spent, suspects, known, notes_of = {}, {}, {}, {}, {}
if #ids > 0 then
  local words, lefts = redis.call('HMGET', lease, unpack(ids)), redis.call('HMGET', counts, unpack(ids))
  local notes = redis.call('HMGET', errors, unpack(ids))
  for i, id in ipairs(ids) do
    local word, left = words[i], count(lefts[i])
    if not (lefts[i] and lefts[i]:match('^-?%d+$')) then odd[#odd + 1] = id end
    if cancelled(word) then
      gone[#gone + 1] = id
    elseif left <= 0 then
      local text = (notes[i] or ''):match('^%S+ %S+ (.*)$') or ''
      if word ~= 'nacked' then notes_of[#notes_of + 1], notes_of[#notes_of + 2] = id, 'lease - ' .. text end
      buried[#buried + 1], known[#known + 1] = id, id
    else
      local where = word == 'nacked' and again or overdue
      where[#where + 1], back[#back + 1] = id, id
      spent[#spent + 1], spent[#spent + 2] = id, left - 1
      if word and word ~= 'nacked' then suspects[#suspects + 1], suspects[#suspects + 2] = id, 'suspect' end
      if word == 'nacked' then known[#known + 1] = id end
    end
  end

  begin(unack)
  if #back > 0 then
    redis.call('LPUSH', retry, unpack(back))
    redis.call('HSET', counts, unpack(spent))
    push_token()
  end
  if #suspects > 0 then redis.call('HSET', lease, unpack(suspects)) end
  if #notes_of > 0 then redis.call('HSET', errors, unpack(notes_of)) end
  if #buried > 0 then redis.call('SADD', garbage, unpack(buried)) end
  redis.call('ZREM', unack, unpack(ids))
  if #buried > 0 then redis.call('HDEL', counts, unpack(buried)) end
  if #known > 0 then redis.call('HDEL', lease, unpack(known)) end
  finish('cancelled', gone)
  add('retried_lease', #overdue)
  add('retried_nack', #again)
end
return { wait_for(unack), overdue, again, buried, gone, odd }
