-- nack: unack -> unack at the redelivery time, or garbage when no retry is left or it is rejected
--
-- KEYS  unack garbage counts lease errors totals ends wake watch | msg
-- ARGV  clock bare | id nonce left delay_ms note value
-- Returns  the indexes of receipts that no longer hold, then those that ended as cancelled
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- `note` is reason, attempt and error. The retry is spent when the redelivery time comes: by reclaim. A message
-- that must not run again brings its `value`, so that its letter has a body whatever its TTL.

local ids, held, lost = receipts()
local gone, stopped, waiting, buried = {}, {}, 0, 0
for i, id in ipairs(ids) do
  local value, delay = arg(i, VALUE), tonumber(arg(i, DELAY_MS))
  if held[i] then redis.call('ZREM', unack, id) end
  if cancelled(held[i]) then
    gone[#gone + 1], stopped[#stopped + 1] = id, i
  elseif held[i] and value ~= '' then
    redis.call('HDEL', counts, id)
    redis.call('HDEL', lease, id)
    redis.call('HSET', errors, id, arg(i, NOTE))
    redis.call('SET', body(i), value)
    redis.call('SADD', garbage, id)
    buried = buried + 1
  elseif held[i] then
    local due = now_up + delay
    put(unack, due, { id })
    redis.call('HSET', lease, id, 'nacked')
    redis.call('HSET', errors, id, arg(i, NOTE))
    postpone(body(i), delay, due)
    waiting = waiting + 1
  end
end
finish('cancelled', gone)
add('nacked', waiting + buried)
return { lost, stopped }
