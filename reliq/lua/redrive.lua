-- redrive: dead letter -> ready, or pending when it is due later
--
-- KEYS  dead pending ready counts garbage lease totals wake watch | msg
-- ARGV  clock delay_ms ttl_ms | letter id retries
-- Returns  `redriven`, `alive` (the letter stays) or `not_found` for each
-- Nothing to do: `not_found`.

local answers, ids = {}, {}
local due = tonumber(delay_ms) > 0 and now_up + delay_ms or now_down
for i = 1, ITEMS do
  local id, key = arg(i, ID), body(i)
  local letter = redis.call('XRANGE', dead, arg(i, LETTER), arg(i, LETTER))[1]
  local fields = {}
  for f = 1, letter and #letter[2] or 0, 2 do fields[letter[2][f]] = letter[2][f + 1] end
  if fields.id ~= id then
    answers[i] = 'not_found'
  elseif redis.call('HEXISTS', counts, id) == 1 or redis.call('SISMEMBER', garbage, id) == 1 then
    answers[i] = 'alive'
  else
    redis.call('XDEL', dead, letter[1])
    redis.call('HDEL', lease, id)
    redis.call('SET', key, fields.value, 'PX', string.format('%.0f', delay_ms + ttl_ms))
    postpone(key, 0, due)
    redis.call('HSET', counts, id, arg(i, RETRIES))
    answers[i], ids[#ids + 1] = 'redriven', id
  end
end
if #ids > 0 and tonumber(delay_ms) > 0 then
  put(pending, due, ids)
elseif #ids > 0 then
  redis.call('LPUSH', ready, unpack(ids))
  push_token()
end
add('redriven', #ids)
return answers
