-- lines: how many messages of which key wait, and why
--
-- KEYS  limits ring held asleep rates retries_left line
-- ARGV  clock most | key
-- Runs  limits:HGET,HMGET ring:ZCARD,ZRANDMEMBER,ZRANGE,ZSCORE held:ZCARD,ZLEXCOUNT,ZRANDMEMBER
--       asleep:ZCARD,ZRANDMEMBER,ZSCORE rates:ZSCORE retries_left:HRANDFIELD line:LINDEX,LLEN
-- Returns  how many keys are in the ring, how many sleep, how many messages run, 1 when none may start now, until when the
--   queue sleeps in unix seconds ('' not), the id whose turn is next ('' none); then for each key: its name, how many wait,
--   how many have a place, the most that may (0: any number), until when it sleeps, its weight, and 1 when it is in the ring
-- Nothing to do: zeros.
--
-- Without keys: the `most` largest of those that a bounded look meets.

local asked, met, rows = {}, {}, {}
local function meet(key)
  if key and key ~= '' and key ~= '\2' and not met[key] then asked[#asked + 1], met[key] = key, true end
end
for i = 1, ITEMS do meet(arg(i, KEY)) end
if ITEMS == 0 then
  for _, zset in ipairs({ ring, asleep }) do
    for _, key in ipairs(redis.call('ZRANDMEMBER', zset, 100)) do meet(key) end
  end
  for _, member in ipairs(redis.call('ZRANDMEMBER', held, 100)) do meet(member:match('^(.-)%z')) end
  local counts = redis.call('HRANDFIELD', retries_left, 200, 'WITHVALUES')
  for i = 2, #counts, 2 do meet(key_in(counts[i])) end
end

for _, key in ipairs(asked) do
  local row = { key, read('LLEN', line .. key), in_flight(key), places_of(key) or 0, redis.call('ZSCORE', asleep, key) or '' }
  if ITEMS > 0 or row[2] > 0 or row[3] > 0 or row[5] ~= '' then rows[#rows + 1] = row end
end
if ITEMS == 0 then table.sort(rows, function(a, b) return a[2] > b[2] or (a[2] == b[2] and a[1] < b[1]) end) end

local own, sleeps = redis.call('ZSCORE', ring, ''), redis.call('ZSCORE', asleep, '')
local first = redis.call('ZRANGE', ring, 0, 1)
local key = first[1] == '' and first[2] or first[1]
local answer = {
  redis.call('ZCARD', ring) - (own and 1 or 0), redis.call('ZCARD', asleep) - (sleeps and 1 or 0),
  redis.call('ZCARD', held) - 2 * in_flight('\2'), queue_room() == 0 and 1 or 0, sleeps or '',
  key and redis.call('LINDEX', line .. key, -1) or '',
}
for i = 1, ITEMS > 0 and #rows or math.min(#rows, tonumber(most)) do
  for _, one in ipairs(rows[i]) do answer[#answer + 1] = one end
  answer[#answer + 1] = tostring(weight_of(rows[i][1]))
  answer[#answer + 1] = redis.call('ZSCORE', ring, rows[i][1]) and 1 or 0
end
return answer
