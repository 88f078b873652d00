-- cancel: pending -> gone, a nacked one -> gone; in a list or in a worker it is marked and ends where it is met
--
-- KEYS  pending unack counts lease errors totals ends | msg dd
-- ARGV  clock tombstone_ms | id
-- Returns  `cancelled`, `running` or `not_found` for each id
-- Nothing to do: `not_found`, and a tombstone that a publish still on its way will meet.

local answers, gone, notes = {}, {}, {}
for i = 1, ITEMS do
  local id, key, dd = arg(i, ID), body(i), mark(i)
  local word, held = redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local before = redis.pcall('GET', dd)
  answers[i] = 'cancelled'
  if redis.call('ZSCORE', pending, id) or (held and word == 'nacked') then
    redis.call('ZREM', pending, id)
    redis.call('ZREM', unack, id)
    redis.call('DEL', key)
    gone[#gone + 1], notes[#gone + 1] = id, redis.call('HGET', errors, id)
    forget({ id })
  elseif held then
    redis.call('DEL', key)
    if not cancelled(word) then redis.call('HSET', lease, id, (word or '') .. '!') end
    answers[i] = 'running'
  elseif redis.call('HEXISTS', counts, id) == 1 then
    redis.call('DEL', key)
    redis.call('HSET', lease, id, '!')
  elseif before ~= 'cancelled' then
    answers[i] = 'not_found'
  end
  local mark_of = answers[i] == 'not_found' and 'unknown' or 'cancelled'
  -- A marker that lasts longer stays: the id is taken until then.
  if redis.call('PTTL', dd) < tonumber(tombstone_ms) or (mark_of == 'cancelled' and before ~= mark_of) then
    redis.call('DEL', dd)
    redis.call('SET', dd, mark_of, 'PX', tombstone_ms)
  end
end
add('cancelled', #gone)
note_ends(ends, 1000, 'cancelled', gone, notes)
return answers
