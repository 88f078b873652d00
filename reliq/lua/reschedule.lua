-- reschedule: pending -> pending, a nacked one -> unack, each at another time; in a list it moves when it is met
--
-- KEYS  pending unack counts lease wake watch | msg
-- ARGV  clock at delay_ms | id
-- Returns  `rescheduled`, `running` or `not_found` for each id
-- Nothing to do: `not_found`.

local due = tonumber(at) or (now_up + delay_ms)
local answers = {}
for i = 1, ITEMS do
  local id = arg(i, ID)
  local word, held = redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local before = redis.call('ZSCORE', pending, id)
  answers[i] = 'rescheduled'
  if before then
    redis.call('ZREM', pending, id)
    put(pending, due, { id })
  elseif held and word == 'nacked' then
    before = held
    redis.call('ZREM', unack, id)
    put(unack, due, { id })
  elseif held then
    answers[i] = 'running'
  elseif redis.call('HEXISTS', counts, id) == 1 and not cancelled(word) then
    local doubt = word and word:match('suspect') or (word or ''):match('%?$')
    redis.call('HDEL', lease, id)
    redis.call('HSET', lease, id, '@' .. string.format('%.0f', due) .. (doubt and '?' or ''))
  else
    answers[i] = 'not_found'
  end
  if answers[i] == 'rescheduled' then
    postpone(body(i), due - (before and ms_of(before) or now_down), due)
  end
end
return answers
