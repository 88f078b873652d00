-- check_keys: find stuck message keys, and wrong or missing entries in the Redis key `held`, and repair them
--
-- KEYS  unack pending retries_left lease wake limits ring held asleep rates line
-- ARGV  clock repair | key id
-- Runs  unack:ZSCORE pending:ZSCORE retries_left:HGET lease:HGET wake:LLEN,LPUSH limits:HGET,HMGET
--       ring:ZADD,ZRANGE,ZREM,ZSCORE held:ZADD,ZCARD,ZLEXCOUNT,ZREM,ZSCORE asleep:ZMSCORE,ZREM,ZSCORE rates:ZSCORE line:EXISTS
-- Returns  the fault of each item, an empty text without a fault
-- Nothing to do: empty texts.
--
-- For an item with a message id, check the entry of the message in `held`. This entry counts the message against the
-- concurrency limit of its message key. For an item without an id, check the message key.
--
-- The Redis key `asleep` stores the time until which a message key is paused or throttled. The time is infinite for a
-- pause without an end. Any other time that is more than ten years in the future is a fault.

local answers, keys, freed, taken, awake, out = {}, {}, {}, {}, {}, {}

local function fault_of_key(key)
  local sleeps, waits_there = redis.call('ZSCORE', asleep, key), redis.call('EXISTS', line .. key) == 1
  local ms, served = sleeps and tonumber(sleeps) * 1000, redis.call('ZSCORE', ring, key)
  if ms and (ms ~= ms or ms < 1e12 or (ms < math.huge and ms > now_up + 3660 * 86400000)) then
    awake[#awake + 1] = key
    return 'long-sleep'
  elseif served and not waits_there then
    out[#out + 1] = key
    return 'stray-turn'
  end
  local may = waits_there and not sleeps and places_free(key) > 0
  return may and not served and 'stuck-key' or ''
end

local function fault_of_place(key, id)
  local member, word = place(key, id), redis.call('HGET', lease, id)
  if redis.call('ZSCORE', held, member) then
    if not is_stray(key, id) then return '' end
    freed[#freed + 1] = member
    return 'stray-place'
  end
  local is_leased = redis.call('ZSCORE', unack, id) and word and not waits(word)
  if not is_leased or key_in(redis.call('HGET', retries_left, id)) ~= key then return '' end
  pair(taken, 0, member)
  return 'no-place'
end

for i = 1, ITEMS do
  local key, id = arg(i, KEY), arg(i, ID)
  keys[i] = key
  if id ~= '' then
    answers[i] = fault_of_place(key, id)
  else
    answers[i] = key == '' and '' or fault_of_key(key)
  end
end
if repair ~= '' then
  run('ZADD', held, taken)
  run('ZREM', held, freed)
  run('ZREM', asleep, awake)
  run('ZREM', ring, out)
  ring_in(keys)
  if #freed > 0 then offer() end
end
return answers
