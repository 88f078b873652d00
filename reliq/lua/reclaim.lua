-- reclaim: unack -> retry, unack -> garbage
--
-- KEYS  unack retry garbage counts lease errors totals ends wake
-- ARGV  clock limit spare
-- Returns  ms until the next deadline (-1: none), the ids whose lease ran out (suspects from now on),
--          the nacked ids that are due again, the ids with no retry left, the ids that were cancelled,
--          and those whose count was missing or no number
-- Nothing to do: that wait and empty lists.
--
-- With `spare` set only nacked and cancelled messages move: a lease that is over may be about to be renewed.

local ids = redis.call('ZRANGEBYSCORE', unack, '-inf', score(now_down), 'LIMIT', 0, limit)
local overdue, again, buried, gone, odd = {}, {}, {}, {}, {}
if spare ~= '' and #ids > 0 then
  local over = {}
  for i, word in ipairs(redis.call('HMGET', lease, unpack(ids))) do
    if word == 'nacked' or cancelled(word) then over[#over + 1] = ids[i] end
  end
  ids = over
end
if #ids > 0 then
  local words, lefts = redis.call('HMGET', lease, unpack(ids)), redis.call('HMGET', counts, unpack(ids))
  local notes = redis.call('HMGET', errors, unpack(ids))
  redis.call('ZREM', unack, unpack(ids))
  for i, id in ipairs(ids) do
    local word, left = words[i], count(lefts[i])
    if not (lefts[i] and lefts[i]:match('^-?%d+$')) then odd[#odd + 1] = id end
    if cancelled(word) then
      gone[#gone + 1] = id
    elseif left <= 0 then
      local text = (notes[i] or ''):match('^%S+ %S+ (.*)$') or ''
      redis.call('HDEL', counts, id)
      redis.call('HDEL', lease, id)
      if word ~= 'nacked' then redis.call('HSET', errors, id, 'lease - ' .. text) end
      redis.call('SADD', garbage, id)
      buried[#buried + 1] = id
    else
      redis.call('HSET', counts, id, left - 1)
      redis.call('HDEL', lease, id)
      if word ~= 'nacked' then redis.call('HSET', lease, id, 'suspect') end
      redis.call('LPUSH', retry, id)
      local where = word == 'nacked' and again or overdue
      where[#where + 1] = id
    end
  end
  if #again + #overdue > 0 then push_token() end
  finish('cancelled', gone)
  add('retried_lease', #overdue)
  add('retried_nack', #again)
end
return { wait_for(unack), overdue, again, buried, gone, odd }
