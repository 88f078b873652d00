-- key_queues: read how many messages wait in the key queues, and why they wait
--
-- KEYS  limits ring held asleep rates retries_left line
-- ARGV  clock most | key
-- Runs  limits:HGET,HMGET ring:ZCARD,ZRANDMEMBER,ZRANGE,ZSCORE held:ZCARD,ZLEXCOUNT,ZRANDMEMBER
--       asleep:ZCARD,ZRANDMEMBER,ZSCORE rates:ZSCORE retries_left:HRANDFIELD line:LINDEX,LLEN
-- Returns  how many keys have messages that wait for a worker; how many keys are throttled or paused; how many messages
--          run; 1 if the queue's limits allow no start now; when the throttling of the whole queue ends, in unix
--          seconds ('': it is not throttled); and the id of the message with a key that is claimed next ('': none).
--          Then for each key: its name, its waiting messages, its running messages, its concurrency limit (0: none),
--          when its throttling ends, its weight, and 1 if its messages wait for a worker.
-- Nothing to do: if no messages wait or run, returns zeros.
--
-- If the script call has no keys, the script reads a random sample of keys, and returns at most `most` keys with the
-- longest key queues.

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

for i, key in ipairs(asked) do rows[i] = { key, read('LLEN', line .. key) } end
if ITEMS == 0 then table.sort(rows, function(a, b) return a[2] > b[2] or (a[2] == b[2] and a[1] < b[1]) end) end

local own, sleeps = redis.call('ZSCORE', ring, ''), redis.call('ZSCORE', asleep, '')
local first, left = redis.call('ZRANGE', ring, 0, 1), ITEMS > 0 and ITEMS or tonumber(most)
local key = first[1] == '' and first[2] or first[1]
local answer = {
  redis.call('ZCARD', ring) - (own and 1 or 0), redis.call('ZCARD', asleep) - (sleeps and 1 or 0),
  running(), queue_room() == 0 and 1 or 0, sleeps or '',
  key and redis.call('LINDEX', line .. key, -1) or '',
}
for _, row in ipairs(rows) do
  if left == 0 then break end
  local name, waits, till = row[1], row[2], redis.call('ZSCORE', asleep, row[1])
  local places = in_flight(name)
  if ITEMS > 0 or waits > 0 or places > 0 or till then
    left = left - 1
    for _, one in ipairs({
      name, waits, places, places_of(name) or 0, till or '', tostring(weight_of(name)), redis.call('ZSCORE', ring, name) and 1 or 0,
    }) do answer[#answer + 1] = one end
  end
end
return answer
