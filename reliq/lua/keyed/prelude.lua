-- Shared by the scripts of queues with keys, in addition to the prelude. Functions here replace those with the same
-- name there. A message's key is stored after its retries: `12 tenant-7`; a message without a key has the key ``. The
-- reserved keys \1high and \1low are the key queues of priorities; publishers' keys contain no control characters.
--
-- A key queue has the waiting messages of a key, the oldest at the right. The ring has the keys that may be served,
-- each with a pass. The key with the lowest pass is served next; each message raises the pass by 1 / weight. The pass
-- of `` is for ready and retry. `held` has KEY\0ID for each message with a place of its key, and \2\0ID for messages
-- that keep their place while they wait (in order, after a nack or a snooze). A place is taken before the lease, and
-- freed after it.

local key_of, priorities, limits_read = {}, { ['\1high'] = 4, ['\1low'] = 0.25 }, nil

-- Combine and split the retry count and the key of a message, as stored in Redis.
local function key_in(text) return text and text:match('^%-?%d+ (.+)$') or '' end
local function left_in(text) return text and text:match('^%-?%d+ .') and text:match('^%-?%d+') or text end
local function counted(left, key) return key == '' and left or left .. ' ' .. key end

-- The key in the header of a message's value.
local function key_of_value(value)
  local header = (value or ''):match('^RELIQ/1 ([^\n]*"k":[^\n]*)\n')
  local is_json, read_header = pcall(cjson.decode, header or '')
  local key = is_json and type(read_header) == 'table' and type(read_header.k) == 'string' and read_header.k or ''
  return (priorities[key] or (#key <= 128 and not key:find('%c'))) and key or ''
end

local function key_arg(i) return keyed == '1' and arg(i, KEY) or '' end
local function place(key, id) return key .. '\0' .. id end
local function in_flight(key) return redis.call('ZLEXCOUNT', held, '[' .. key .. '\0', '(' .. key .. '\1') end

local function limits_now()
  if limits_read then return limits_read end
  local names = { 'per_key', 'rate_us', 'burst', 'key_rate_us', 'key_burst', 'concurrency', 'ordered', 'weighted', 'walk' }
  local found = redis.call('HMGET', limits, unpack(names))
  limits_read = {}
  for i, name in ipairs(names) do limits_read[name] = tonumber(found[i] or '') end
  limits_read.walk, limits_read.burst, limits_read.key_burst = found[#names], limits_read.burst or 1, limits_read.key_burst or 1
  if limits_read.ordered == 1 then limits_read.per_key = 1 end
  return limits_read
end

-- How many messages of a key may run at the same time; nil for any number.
local function places_of(key) return key ~= '' and not priorities[key] and limits_now().per_key or nil end
local function places_free(key)
  local most = places_of(key)
  return most and most - in_flight(key) or math.huge
end
local function weight_of(key)
  local weight = limits_now().weighted and tonumber(redis.call('HGET', limits, 'weight:' .. key) or '')
  return weight and weight > 0 and weight or priorities[key] or 1
end

-- The rate of a key, or of the queue for ``: the us between two starts, and how many may start at the same time.
local function rate_of(key)
  local conf = limits_now()
  if key == '' then return conf.rate_us, conf.burst end
  if not priorities[key] then return conf.key_rate_us, conf.key_burst end
end

-- The bucket of a rate: how many messages may start now (any number without a rate), and when the bucket is full again,
-- in us. That is at most a whole bucket ahead, unless the clock went back.
local function bucket(key)
  local every, burst = rate_of(key)
  if not every then return math.huge end
  local full = math.min(math.max(tonumber(redis.call('ZSCORE', rates, key) or 0), us), us + every * burst)
  return math.max(0, math.floor(burst - (full - us) / every + 1e-6)), full
end

-- When a bucket that is full at `full` allows the next start.
local function next_start(key, full)
  local every, burst = rate_of(key)
  return math.ceil((full - (burst - 1) * every) / 1000)
end

-- A key that sleeps for its rate has a fifth of a ms after its time; a key that an operator put to sleep has none.
local function is_throttled(until_then) return until_then and until_then * 10000 - ms_of(until_then) * 10 > 1 end
local function throttle(sleeps, buckets, key, full)
  pair(sleeps, score(next_start(key, full)) .. '2', key)
  pair(buckets, string.format('%.0f', full), key)
end

-- How many messages run, and how many more of the queue may start now; none while the queue sleeps.
local function running() return redis.call('ZCARD', held) - 2 * in_flight('\2') end
local function queue_room()
  local room, concurrency, sleeps = bucket(''), limits_now().concurrency, redis.call('ZSCORE', asleep, '')
  if concurrency then room = math.max(0, math.min(room, concurrency - running())) end
  return sleeps and ms_of(sleeps) > now_down and 0 or room
end

-- Wake a process, unless no message may start now.
local function offer()
  if queue_room() > 0 then push_token() end
end

local function keys_in_ring() return redis.call('ZCARD', ring) - (redis.call('ZSCORE', ring, '') and 1 or 0) end

-- Add keys to the ring that may be served: they have waiting messages and a free place, and do not sleep.
local function ring_in(keys)
  if #keys == 0 then return end
  local sleeps, new = redis.call('ZMSCORE', asleep, unpack(keys)), {}
  local first = redis.call('ZRANGE', ring, 0, 0, 'WITHSCORES')[2] or 0
  for i, key in ipairs(keys) do
    if not sleeps[i] and redis.call('EXISTS', line .. key) == 1 and places_free(key) > 0 then
      pair(new, string.format('%.17g', first + 1 / weight_of(key)), key)
    end
  end
  if #new > 0 and redis.call('ZADD', ring, 'NX', unpack(new)) > 0 then offer() end
end

-- Group ids by key; also return the keys without ``, each once.
local function by_key(ids)
  local keys, some = {}, { [''] = {} }
  for _, id in ipairs(ids) do
    local key = key_of[id] or ''
    if not some[key] then keys[#keys + 1], some[key] = key, {} end
    table.insert(some[key], id)
  end
  return keys, some
end

-- Add messages to the tails of their key queues.
local function line_up(ids)
  local keys, some = by_key(ids)
  local woken = {}
  if run('LPUSH', ready, some['']) then offer() end
  for _, key in ipairs(keys) do
    if run('LPUSH', line .. key, some[key]) == #some[key] then woken[#woken + 1] = key end
  end
  ring_in(woken)
end

-- Add new messages: each to its key queue, or to pending if it is due later. Messages of a key with the same due time
-- stay in publish order: each score is at least half a us above the previous score. A call needs up to 500 such steps,
-- and a ms has 1,000. When 500 steps are used, the scores continue in the next ms, for at most 20 ms.
local function enter(ids, due)
  if due <= now_down then return line_up(ids) end
  local ms, rows, last, base, before, first = due, {}, {}, nil, nil, nil
  repeat
    base = score(ms)
    before = redis.call('ZRANGE', pending, '(' .. base .. '5', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2]
    first = before and math.max(0, math.floor((before - base) * 2e6 + 1.98)) or 0
    ms = ms + 1
  until first < 500 or ms > due + 19
  for _, id in ipairs(ids) do
    local key = key_of[id]
    local step = key == '' and 0 or last[key] and last[key] + 1 or first
    last[key] = step
    pair(rows, step == 0 and base or base .. string.format('%04d', 5 * step), id)
  end
  if run('ZADD', pending, rows) and not before then
    redis.call('DEL', watch)
    push_token()
  end
end

-- The list that still has a cancelled message, and its key; nil if the message is far from the head.
local function old_place(id)
  local key = key_in(redis.call('HGET', retries_left, id))
  local list = key == '' and ready or line .. key
  return read('LPOS', list, id, 'RANK', -1, 'MAXLEN', math.ceil(100000 / ITEMS)) and { list, key } or nil
end

-- Remove cancelled messages from their old places after they were published again at the tails of their key queues.
local function leave_old(places, ids)
  for id, from in pairs(places) do
    redis.call('LREM', from[1], -1, id)
    if redis.call('EXISTS', from[1]) == 0 then redis.call('ZREM', ring, from[2]) end
    ids[#ids + 1] = id
  end
end

-- Return messages to the heads of their key queues, the first of `ids` foremost; return the ids without a key.
local function come_back(ids)
  local keys, some = by_key(ids)
  for _, key in ipairs(keys) do run('RPUSH', line .. key, reversed(some[key])) end
  return some['']
end

-- Queue messages for redelivery; messages with a key come before all others of their key.
local function redeliver(ids)
  if run('LPUSH', retry, come_back(ids)) then offer() end
end

-- Places of the queue have become free.
local function offer_places()
  if limits_now().concurrency and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end
end

-- Store the key of each message from its valid receipt. An invalid receipt may belong to an earlier message with the
-- same id and another key.
local function note_keys(receipt_of)
  for id, i in pairs(receipt_of) do
    if i then key_of[id] = key_arg(i) end
  end
end

-- Free the places of messages, so that others of their keys may start.
local function free_places(ids)
  if #ids == 0 then return end
  local away = {}
  for _, id in ipairs(ids) do pair(away, place(key_of[id] or '', id), place('\2', id)) end
  redis.call('ZREM', held, unpack(away))
  ring_in((by_key(ids)))
  offer_places()
end

-- Free the places of messages that wait for redelivery; ordered messages keep them, and their key waits.
local function stand_by(ids)
  local free, kept, is_ordered = {}, {}, limits_now().ordered == 1
  for _, id in ipairs(ids) do
    if is_ordered and places_of(key_of[id] or '') then pair(kept, 0, place('\2', id)) else free[#free + 1] = id end
  end
  if run('ZADD', held, kept) then offer_places() end
  free_places(free)
end

-- The lists that are served next, at most `spread` keys of the ring, each with how many of its messages may start.
local function rows_of(lengths, room)
  local rows, own, at = {}, nil, 1
  local found = redis.call('ZRANGE', ring, 0, math.min(room, spread), 'WITHSCORES')
  for k = 1, #found, 2 do
    local key, pass = found[k], tonumber(found[k + 1])
    if key == '' then own = pass else rows[#rows + 1] = { key = key, list = line .. key, pass = pass } end
  end
  own = own or tonumber(redis.call('ZSCORE', ring, '') or rows[1] and rows[1].pass or 0)
  while rows[at] and rows[at].pass < own do at = at + 1 end
  -- Ready and retry count together as one list in the turns.
  local most = spread
  for _, list in ipairs(first == 'retry' and { ready, retry } or { retry, ready }) do
    if lengths[list] > 0 then table.insert(rows, at, { key = '', list = list, pass = own }) end
  end
  if at <= spread and lengths[ready] > 0 and lengths[retry] > 0 then most = spread + 1 end
  while #rows > most do table.remove(rows) end
  return rows
end

-- Whether the map gives the queue several shards, or did so before the current change.
local function is_sharded()
  local text = redis.pcall('GET', map)
  local n, was = (type(text) == 'string' and text or ''):match('"n":(%d+),"was":(%d+)')
  return n and (n ~= '1' or was ~= '1')
end

-- Read the heads of the lists, about 2,000 ids at most, and the state of each id.
local function read_rows(rows, room)
  local all = {}
  local all_weights, more = 0, math.max(1, math.floor(2 * room / #rows))
  for _, row in ipairs(rows) do
    row.weight = weight_of(row.key)
    all_weights = all_weights + row.weight
  end
  for _, row in ipairs(rows) do
    row.at, row.started, row.back, row.may = 0, 0, {}, math.huge
    if row.key ~= '' then row.may, row.full = bucket(row.key) end
    row.most = math.min(places_free(row.key), row.may)
    -- Read more ids than may start, so that cancelled or postponed ids at the head are skipped in the same call.
    row.reach = math.min(math.ceil(room * row.weight / all_weights), row.most) + (row.key == '' and 0 or more)
    row.ids, row.first = row.most > 0 and read('LRANGE', row.list, -row.reach, -1) or {}, #all
    for _, id in ipairs(row.ids) do all[#all + 1] = id end
  end
  return #all > 0 and read('HMGET', lease, unpack(all)), #all > 0 and read('HMGET', retries_left, unpack(all))
end

-- Serve the rows in the order of their passes until `room` messages have started. `meet` decides on a message and
-- returns whether it has started.
local function take_turns(rows, room, meet, words, counts)
  local heaviest = 1
  for _, row in ipairs(rows) do heaviest = math.max(heaviest, row.weight) end
  while #rows > 0 and room > 0 do
    local least, on = math.huge, {}
    for _, row in ipairs(rows) do least = math.min(least, row.pass) end
    for _, row in ipairs(rows) do
      while row.pass < least + 1 / heaviest and row.started < row.most and row.at < #row.ids and not row.stops and room > 0 do
        local i = #row.ids - row.at
        local started = meet(row, row.ids[i], words[row.first + i], counts[row.first + i])
        if not row.stops then row.at = row.at + 1 end
        if started then row.started, room = row.started + 1, room - 1 end
        if started or row.stops then row.pass, row.is_moved = row.pass + 1 / row.weight, true end
      end
      if row.started < row.most and row.at < #row.ids and not row.stops then on[#on + 1] = row end
    end
    rows = on
  end
end

-- Remove the handled messages from their lists. Keys without more messages, or without allowed starts, leave the ring.
-- If all ids that were read are gone, the list counts as empty, unless a `misplaced` message was added to it.
local function leave_rows(rows, misplaced)
  local passes, out, own = {}, {}, nil
  for _, row in ipairs(rows) do
    run('LPUSH', row.list, row.back)
    if row.at > 0 then redis.call('LTRIM', row.list, 0, -row.at - 1) end
    local is_read = row.at == #row.ids
    if row.key == '' then
      own = math.max(own or 0, row.pass)
    elseif row.most <= row.started or (is_read and #row.ids < row.reach and #misplaced == 0)
      or (is_read and redis.call('EXISTS', row.list) == 0) then
      out[#out + 1] = row.key
    elseif row.is_moved then
      pair(passes, string.format('%.17g', row.pass), row.key)
    end
  end
  run('ZADD', ring, passes)
  run('ZREM', ring, out)
  -- Also after a purge: new keys start with the lowest pass of the ring.
  if redis.call('EXISTS', ready, retry) == 0 then
    redis.call('ZREM', ring, '')
  elseif own then
    redis.call('ZADD', ring, string.format('%.17g', own), '')
  end
end

-- Check keys that sleep for a rate: wake a key if the rate allows a start now, otherwise update the end of its sleep.
local function review(keys)
  local awake, sleeps, buckets = {}, {}, {}
  for _, key in ipairs(keys) do
    local may, full = bucket(key)
    if may > 0 then awake[#awake + 1] = key else throttle(sleeps, buckets, key, full) end
  end
  run('ZADD', rates, buckets)
  run('ZADD', asleep, sleeps)
  run('ZREM', asleep, awake)
  ring_in(awake)
end

-- The next part of a sorted set, and the cursor of the following part (`-`: no more).
local function part_of(zset, cursor)
  if cursor == '-' then return {}, cursor end
  local part = redis.call('ZSCAN', zset, cursor, 'COUNT', 1000)
  return part[2], part[1] == '0' and '-' or part[1]
end

-- Check some of the keys that were saturated under earlier limits or sleep for an earlier rate. `walk` has the cursors
-- in `held` and in `asleep`.
local function walk_on()
  local conf, keys, is_met, throttled = limits_now(), {}, {}, {}
  local held_at, asleep_at = (conf.walk or ''):match('^(%S+) (%S+)')
  if not held_at then return end
  local members, held_next = part_of(held, held_at)
  local naps, asleep_next = part_of(asleep, asleep_at)
  for i = 1, #members, 2 do
    local key = members[i]:match('^[^%z]*')
    if not is_met[key] then keys[#keys + 1], is_met[key] = key, true end
  end
  for i = 1, #naps, 2 do
    if is_throttled(naps[i + 1]) then throttled[#throttled + 1] = naps[i] end
  end
  ring_in(keys)
  review(throttled)
  conf.walk = (held_next ~= '-' or asleep_next ~= '-') and held_next .. ' ' .. asleep_next
  if conf.walk then redis.call('HSET', limits, 'walk', conf.walk) else redis.call('HDEL', limits, 'walk') end
end

-- Delete some full buckets: they have the same effect as missing buckets.
local function forget_buckets(most)
  run('ZREM', rates, redis.call('ZRANGEBYSCORE', rates, '-inf', '(' .. string.format('%.0f', us), 'LIMIT', 0, most))
end

-- Store the starts in the buckets, and put keys to sleep that have used up their rate. Return whether more messages may
-- start earlier than the known times, and whether a rate is used up. A bucket that was cut because the clock went back
-- is stored too.
local function spend(rows, n)
  local buckets, sleeps, first, may, full = {}, {}, head(asleep), bucket('')
  local is_limited = may == n
  local is_sooner = is_limited and n > 0
  if full and (n > 0 or is_limited) then pair(buckets, string.format('%.0f', full + n * rate_of('')), '') end
  for _, row in ipairs(rows) do
    local full_at = row.full and row.full + row.started * rate_of(row.key)
    if row.may <= row.started then
      throttle(sleeps, buckets, row.key, full_at)
      is_sooner, is_limited = is_sooner or not first or next_start(row.key, full_at) < first, true
    elseif full_at and row.started > 0 then
      pair(buckets, string.format('%.0f', full_at), row.key)
    end
  end
  -- Twice as many are deleted as added, so keys that are used only once leave buckets only for a short time.
  if limits_now().key_rate_us and #buckets > 0 then forget_buckets(#buckets) end
  run('ZADD', rates, buckets)
  run('ZADD', asleep, sleeps)
  return is_sooner, is_limited
end

-- Return the starts of messages that never ran to the rates, and wake the keys that sleep for them. A bucket that was
-- full in the meantime gets less: at most the amount that has refilled since the oldest claim.
local function give_back(ids, more)
  local buckets, throttled, since = {}, {}, 0
  for _, id in ipairs(more) do ids[#ids + 1] = id end
  for i = 1, ITEMS do
    local claimed_at = tonumber(arg(i, TOOK_MS)) or 0
    since = math.max(since, claimed_at <= us and us - claimed_at or math.huge)
  end
  local keys, some = by_key(ids)
  keys[#keys + 1], some[''] = '', ids
  for _, key in ipairs(keys) do
    local refund = #some[key] * (rate_of(key) or 0) - since
    if refund > 0 then
      local _, full = bucket(key)
      pair(buckets, string.format('%.0f', full - refund), key)
      if is_throttled(redis.call('ZSCORE', asleep, key)) then throttled[#throttled + 1] = key end
    end
  end
  run('ZADD', rates, buckets)
  -- The next claim puts keys to sleep again if their rate allows no start, and watches for the earlier time.
  run('ZREM', asleep, throttled)
  ring_in(throttled)
  if #buckets > 0 and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end
end

-- How many ids and keys may be served now.
local function waiting_now()
  if queue_room() == 0 then return 0 end
  return redis.call('LLEN', ready) + redis.call('LLEN', retry) + keys_in_ring()
end

-- The lowest of: ms until a message is due, until a key wakes, and until the queue's rate allows a start.
local function until_more(wait)
  if wait == -2 then return wait end
  if limits_now().walk then return 0 end
  local due, may, full = head(asleep), bucket('')
  if may == 0 then due = math.min(due or math.huge, next_start('', full)) end
  local more = due and math.max(0, math.min(due - now_down, 86400000)) or wait
  return wait < 0 and more or math.min(wait, more)
end

-- Serve the lists until `room` messages have started; return the rows.
local function serve(lengths, room, meet)
  room = math.min(room, queue_room())
  local rows = room > 0 and rows_of(lengths, room) or {}
  take_turns(rows, room, meet, read_rows(rows, room))
  return rows
end

-- Split ids: due messages to be added, and messages that kept their places while they waited.
local function by_place(ids)
  local texts, fresh, kept = run('HMGET', retries_left, ids), {}, {}
  for i, id in ipairs(ids) do
    key_of[id] = key_in(texts[i])
    local is_kept = key_of[id] ~= '' and redis.call('ZSCORE', held, place('\2', id))
    local where = is_kept and kept or fresh
    where[#where + 1] = id
  end
  return fresh, kept
end

-- The keys that have slept long enough, and the keys that sleep for longer than their rate requires because the clock
-- went back.
local function keys_to_wake()
  local awake = redis.call('ZRANGEBYSCORE', asleep, '-inf', score(now_down) .. '5', 'LIMIT', 0, limit)
  local throttled, every = {}, limits_now().key_rate_us
  local longest = every and score(now_up + math.ceil(every / 1000) + 1)
  local late = every and redis.call('ZRANGEBYSCORE', asleep, '(' .. longest, '(+inf', 'WITHSCORES', 'LIMIT', 0, 100) or {}
  for k = 1, #late, 2 do
    if is_throttled(late[k + 1]) then throttled[#throttled + 1] = late[k] end
  end
  return awake, throttled
end

-- Let the keys of messages sleep until a time, unless they sleep longer; for a message without a key the queue sleeps.
local function put_to_sleep(ids, until_then)
  local keys = {}
  for _, id in ipairs(ids) do
    local key = priorities[key_of[id]] and '' or key_of[id]
    if ms_of(redis.call('ZSCORE', asleep, key) or 0) < until_then then keys[#keys + 1] = key end
  end
  put(asleep, until_then, keys)
  run('ZREM', ring, keys)
end

-- Whether ID has no right to a place of KEY: it is not leased and keeps no place while it waits.
local function is_stray(key, id)
  local text, word, deadline = redis.call('HGET', retries_left, id), redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local own, is_waiting = place(key_in(text), id), redis.call('ZSCORE', pending, id) or (deadline and waits(word))
  if key == '\2' then return not (is_waiting and redis.call('ZSCORE', held, own)) end
  local is_kept = is_waiting and redis.call('ZSCORE', held, place('\2', id))
  return not text or place(key, id) ~= own or not ((deadline and not waits(word)) or is_kept)
end
