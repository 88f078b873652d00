-- Each message to ready, or to the line of its key; keys that sleep wake. The wait is for the next message that is due,
-- key that wakes, or start that the queue's rate permits.
--
-- The score of a message with a key lies up to half a ms after its due time: by its place among those of one due time.
-- A message that has kept its place while it was put off comes to the head of its line, others to the tail. A key that
-- sleeps longer than its rate can have it sleep is woken: the clock went back. One that was told to sleep sleeps on.

local ids = redis.call('ZRANGEBYSCORE', pending, '-inf', score(now_down) .. '5', 'LIMIT', 0, limit)
local texts, fresh, kept, conf, buckets = run('HMGET', retries_left, ids), {}, {}, limits_now(), {}
for i, id in ipairs(ids) do
  key_of[id] = key_in(texts[i])
  local is_kept = key_of[id] ~= '' and redis.call('ZSCORE', held, place('\2', id))
  if is_kept then table.insert(kept, 1, id) else fresh[#fresh + 1] = id end
end
local awake = redis.call('ZRANGEBYSCORE', asleep, '-inf', score(now_down), 'LIMIT', 0, limit)
local every, burst = conf.key_rate_us, conf.key_burst or 1
local longest = every and score(now_up + math.ceil(every / 1000) + 1)
local late = every and redis.call('ZRANGEBYSCORE', asleep, '(' .. longest, '(+inf', 'WITHSCORES', 'LIMIT', 0, 100) or {}
for k = 1, #late, 2 do
  if sleeps_for(conf, redis.call('ZSCORE', rates, late[k]), late[k + 1]) then
    awake[#awake + 1] = late[k]
    pair(buckets, string.format('%.0f', us + every * burst), late[k])
  end
end
local room, full = queue_room()
if full and room == 0 then pair(buckets, string.format('%.0f', full), '') end

begin(pending)
run('ZADD', rates, buckets)
line_up(fresh)
come_back(kept)
run('ZREM', pending, ids)
free_places(kept)
run('ZREM', asleep, awake)
ring_in(awake)
walk_on()
forget_buckets(100)
add('promoted', #ids)
if redis.call('EXISTS', ready, retry, ring) > 0 then offer() end
return { #ids, until_more(wait_for(pending)) }
