-- Functions for queues with message keys or limits. A function here replaces the function with the same name in
-- ../prelude.lua.
--
-- A message's key is stored after its retries: `12 tenant-7`. A cost other than 1 follows the key: `12 tenant-7\3800`.
-- A message without a key has the empty key, ``. Messages with a priority have one of the reserved keys \1high and
-- \1low; keys of publishers contain no control characters.
--
-- A key queue is a list of the waiting messages of a key, the oldest at the right. The sorted set `ring` has the keys
-- that may be served; the score of a key is its pass. The key with the lowest pass is served next, and each message
-- raises the pass by 1 / weight. The empty key in the ring has the pass of ready and retry.
--
-- The sorted set `held` has an entry KEY\0ID for each message that counts against the limit of its key. The entry is
-- added before the message is leased, and removed after its lease has ended. An ordered message that waits after a nack
-- or a snooze keeps its entry, so its key stays blocked. Another entry, \2\0ID, shows that the message does not run.
--
-- The sorted set `asleep` has the throttled and paused keys. It has the empty key if the whole queue is throttled.

local key_of, priorities, limits_read, purse_read = {}, { ['\1high'] = 4, ['\1low'] = 0.25 }, nil, nil

-- Read and write the stored text of a message, such as `12 tenant-7\3800`: its retry count, key and cost. Key and cost
-- together are the line of the message.
local function line_in(text) return text and text:match('^%-?%d+ (.+)$') or '' end
local function key_in(text) return text and text:match('^%-?%d+ ([^\3]+)') or '' end
local function cost_in(text) return tonumber((text or ''):match('\3(%d+)$') or 1) end
local function left_in(text) return text and text:match('^%-?%d+ .') and text:match('^%-?%d+') or text end
local function key_of_line(its_line) return its_line:match('^[^\3]*') end
local function counted(left, its_line) return its_line == '' and left or left .. ' ' .. its_line end

-- Return key and cost (the line) from the header of a message's value; an empty text if they are missing or invalid.
local function line_of_value(value)
  local header = (type(value) == 'string' and value or ''):match('^RELIQ/1 ([^\n]*"k":[^\n]*)\n')
  local is_json, read_header = pcall(cjson.decode, header or '')
  local its_line = is_json and type(read_header) == 'table' and type(read_header.k) == 'string' and read_header.k or ''
  local key = key_of_line(its_line)
  return (priorities[key] or (#key <= 128 and not key:find('%c'))) and its_line:find('^[^\3]*\3?%d*$') and its_line or ''
end

local function line_arg(i) return keyed == '1' and arg(i, KEY) or '' end
local function place(key, id) return key .. '\0' .. id end
local function in_flight(key) return redis.call('ZLEXCOUNT', held, '[' .. key .. '\0', '(' .. key .. '\1') end

local function limits_now()
  if limits_read then return limits_read end
  local found = redis.call('HMGET', limits, 'per_key', 'rate_us', 'burst', 'key_rate_us', 'key_burst', 'concurrency',
    'ordered', 'weighted', 'cost_ns', 'walk')
  limits_read = {
    per_key = found[7] == '1' and 1 or tonumber(found[1] or ''),
    rate_us = tonumber(found[2] or ''), burst = tonumber(found[3] or '') or 1,
    key_rate_us = tonumber(found[4] or ''), key_burst = tonumber(found[5] or '') or 1,
    concurrency = tonumber(found[6] or ''), ordered = found[7] == '1',
    weighted = tonumber(found[8] or ''), cost_ns = tonumber(found[9] or ''), walk = found[10],
  }
  return limits_read
end

-- Return how many messages of a key may run at the same time; nil for any number.
local function places_of(key) return key ~= '' and not priorities[key] and limits_now().per_key or nil end
local function places_free(key)
  local most = places_of(key)
  return most and most - in_flight(key) or math.huge
end
local function weight_of(key)
  local weight = limits_now().weighted and tonumber(redis.call('HGET', limits, 'weight:' .. key) or '')
  return weight and weight > 0 and weight or priorities[key] or 1
end

-- Return the rate of a key, or the rate of the queue for the empty key: the us between two starts, and the burst.
local function rate_of(key)
  local conf = limits_now()
  if key == '' then return conf.rate_us, conf.burst end
  if not priorities[key] then return conf.key_rate_us, conf.key_burst end
end

-- Read the token bucket of a key. Return how many messages may start now (any number for a key without a rate), and
-- when the bucket is full again, in unix us. If the clock went back, the stored time is too late; it is then replaced
-- by the time at which an empty bucket would be full.
local function bucket(key)
  local every, burst = rate_of(key)
  if not every then return math.huge end
  local full = math.min(math.max(tonumber(redis.call('ZSCORE', rates, key) or 0), us), us + every * burst)
  return math.max(0, math.floor(burst - (full - us) / every + 1e-6)), full
end

-- Return when the token bucket of a key allows the next start, in unix ms. `full` is when the bucket is full again, in
-- unix us.
local function next_start(key, full)
  local every, burst = rate_of(key)
  return math.ceil((full - (burst - 1) * every) / 1000)
end

-- Return whether a score in `asleep` belongs to a key that is throttled by its rate. Such scores have 0.2 ms added,
-- which distinguishes them from all other scores.
local function is_throttled(until_then) return until_then and until_then * 10000 - ms_of(until_then) * 10 > 1 end
local function throttle(sleeps, buckets, key, full)
  pair(sleeps, score(next_start(key, full)) .. '2', key)
  pair(buckets, string.format('%.0f', full), key)
end

-- Return a table for the token bucket of the queue's rate by cost; nil without such a rate. `full` is when the bucket
-- is full again. If the next message costs more than the bucket has, `waits` is when the bucket will have enough. After
-- `job.spent` reports a higher cost, the bucket may be in debt, by at most its whole size.
local function purse()
  local conf = limits_now()
  if not conf.cost_ns or purse_read then return purse_read end
  local every = conf.cost_ns / 1000
  local whole = every * (tonumber(redis.call('HGET', limits, 'cost_burst') or '') or 1)
  local most = us + 2 * whole
  local full, waits = tonumber(redis.call('ZSCORE', rates, '\3') or 0), tonumber(redis.call('ZSCORE', rates, '\4') or 0)
  local costs = { every = every, most = most, full = math.min(math.max(full, us), most), waits = math.min(waits, most) }
  -- A stored time after `most` means that the clock went back.
  local is_cut, is_spent = math.max(full, waits) > most, false

  -- If this call has changed the bucket, add its times to `buckets`, which the caller writes to Redis.
  function costs.keep(buckets)
    if is_spent or is_cut then pair(buckets, string.format('%.0f', math.ceil(costs.full)), '\3') end
    if costs.is_short or is_cut then pair(buckets, string.format('%.0f', costs.waits), '\4') end
  end

  -- Pay the cost of a message from the bucket, and return whether this was possible. If the bucket has too little, set
  -- `waits` to the time when it has enough. Until then no message starts; otherwise cheap messages would always
  -- overtake an expensive message. A cost above the size of the bucket can be paid if the bucket is full.
  function costs.pay(cost)
    local price = cost * every
    local may_start = costs.full + math.min(price, whole) - whole
    if may_start > us + 0.5 then costs.waits, costs.is_short = math.ceil(may_start), true return false end
    costs.full, is_spent = math.min(costs.full + price, most), true
    return true
  end

  purse_read = costs
  return costs
end

-- After a refund, or after waiting messages were removed, let the next claim check again whether the bucket has enough
-- for the next message.
local function price_head()
  if redis.call('ZREM', rates, '\4') == 1 then push_token() end
end

-- Correct the bucket by the real costs of messages. A receipt with a real cost contains `KEY\3COST CLAIM`; CLAIM is the
-- time of the claim (the fencing token). If a message cost less than it has paid, the bucket gets the difference back,
-- minus the amount that the bucket has gained since the claim, which would otherwise count twice.
local function correct_costs(receipt_of)
  if not purse() then return end
  local change = 0
  for id, i in pairs(receipt_of) do
    local spent, claim = (i and line_arg(i) or ''):match('\3(%d+) (%d+)$')
    if spent then
      local more = (spent - cost_in(redis.call('HGET', retries_left, id))) * purse_read.every
      local elapsed = tonumber(claim) <= us and us - claim or math.huge
      change = change + (more < 0 and math.min(0, more + elapsed) or more)
    end
  end
  if change == 0 then return end
  redis.call('ZADD', rates, string.format('%.0f', math.min(purse_read.full + change, purse_read.most)), '\3')
  if change < 0 then price_head() end
end

-- `running` returns how many messages of the queue run. `queue_room` returns how many more may start now: 0 while the
-- whole queue is throttled.
local function running() return redis.call('ZCARD', held) - 2 * in_flight('\2') end
local function queue_room()
  local room, concurrency, sleeps = bucket(''), limits_now().concurrency, redis.call('ZSCORE', asleep, '')
  if concurrency then room = math.max(0, math.min(room, concurrency - running())) end
  if purse() and purse_read.waits > us then room = 0 end
  return sleeps and ms_of(sleeps) > now_down and 0 or room
end

-- Wake a process if a message may start now.
local function offer()
  if queue_room() > 0 then push_token() end
end

local function keys_in_ring() return redis.call('ZCARD', ring) - (redis.call('ZSCORE', ring, '') and 1 or 0) end

-- Add keys to the ring if they may be served: if messages of the key wait, its limit allows another start, and it is
-- not in `asleep`.
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

-- Return the keys of messages, without repetitions and without the empty key, and a table from each key to its ids.
local function by_key(ids)
  local keys, some = {}, { [''] = {} }
  for _, id in ipairs(ids) do
    local key = key_of[id] or ''
    if not some[key] then keys[#keys + 1], some[key] = key, {} end
    table.insert(some[key], id)
  end
  return keys, some
end

-- Add messages to the tails of their key queues, and messages without a key to ready.
local function line_up(ids)
  local keys, some = by_key(ids)
  local woken = {}
  if run('LPUSH', ready, some['']) then offer() end
  for _, key in ipairs(keys) do
    if run('LPUSH', line .. key, some[key]) == #some[key] then woken[#woken + 1] = key end
  end
  ring_in(woken)
end

-- Add new messages to their key queues, or to pending if they are due later. In pending, messages of a key with the
-- same due time keep their publish order: each score is at least half a us above the previous score. A call with 500
-- messages of one key needs 500 such steps. If earlier messages use the first 500 steps after the due time, the scores
-- begin in a later ms, less than 20 ms after it.
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

-- Return the list that still contains a cancelled message, and the message's key; nil if the message is not found near
-- the head of the list.
local function old_place(id)
  local key = key_in(redis.call('HGET', retries_left, id))
  local list = key == '' and ready or line .. key
  return read('LPOS', list, id, 'RANK', -1, 'MAXLEN', math.ceil(100000 / ITEMS)) and { list, key } or nil
end

-- Remove cancelled messages from their old lists, after new messages with the same ids were added at the tails of their
-- key queues.
local function leave_old(places, ids)
  for id, from in pairs(places) do
    redis.call('LREM', from[1], -1, id)
    if redis.call('EXISTS', from[1]) == 0 then redis.call('ZREM', ring, from[2]) end
    ids[#ids + 1] = id
  end
end

-- Put messages back at the heads of their key queues, so that the first of `ids` is claimed first. Return the ids
-- without a key.
local function come_back(ids)
  local keys, some = by_key(ids)
  for _, key in ipairs(keys) do run('RPUSH', line .. key, reversed(some[key])) end
  return some['']
end

-- Queue messages for redelivery: at the heads of their key queues, or in retry if they have no key.
local function redeliver(ids)
  if run('LPUSH', retry, come_back(ids)) then offer() end
end

-- Wake a process after messages have ended, because the queue's concurrency may allow more starts.
local function offer_places()
  if limits_now().concurrency and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end
end

-- Store the key of each message, from its valid receipt, in `key_of`. Ignore invalid receipts, because they may belong
-- to earlier messages with the same ids and other keys.
local function note_keys(receipt_of)
  for id, i in pairs(receipt_of) do
    if i then key_of[id] = key_of_line(line_arg(i)) end
  end
end

-- Remove messages from `held`, so that other messages of their keys may start.
local function free_places(ids)
  if #ids == 0 then return end
  local away = {}
  for _, id in ipairs(ids) do pair(away, place(key_of[id] or '', id), place('\2', id)) end
  redis.call('ZREM', held, unpack(away))
  ring_in((by_key(ids)))
  offer_places()
end

-- Remove messages that wait for redelivery from `held`. Ordered messages stay there, so other messages of their keys
-- wait too.
local function stand_by(ids)
  local free, kept, is_ordered = {}, {}, limits_now().ordered
  for _, id in ipairs(ids) do
    if is_ordered and places_of(key_of[id] or '') then pair(kept, 0, place('\2', id)) else free[#free + 1] = id end
  end
  if run('ZADD', held, kept) then offer_places() end
  free_places(free)
end

-- Return the lists that are served next, in the order of their passes: ready, retry and the queues of at most `spread`
-- keys.
local function rows_of(lengths, room)
  local rows, own, at = {}, nil, 1
  local found = redis.call('ZRANGE', ring, 0, math.min(room, spread), 'WITHSCORES')
  for k = 1, #found, 2 do
    local key, pass = found[k], tonumber(found[k + 1])
    if key == '' then own = pass else rows[#rows + 1] = { key = key, list = line .. key, pass = pass } end
  end
  own = own or tonumber(redis.call('ZSCORE', ring, '') or rows[1] and rows[1].pass or 0)
  -- If a key and ready have the same pass, ready comes first. With a rate by cost, the key comes first, because
  -- messages without a key would otherwise always overtake an expensive message of a key.
  while rows[at] and (rows[at].pass < own or rows[at].pass == own and purse()) do at = at + 1 end
  -- Ready and retry count as one list in the turns.
  local most = spread
  for _, list in ipairs(first == 'retry' and { ready, retry } or { retry, ready }) do
    if lengths[list] > 0 then table.insert(rows, at, { key = '', list = list, pass = own }) end
  end
  if at <= spread and lengths[ready] > 0 and lengths[retry] > 0 then most = spread + 1 end
  while #rows > most do table.remove(rows) end
  return rows
end

-- Return whether the shard map gives the queue several shards, or did so before the current resize.
local function is_sharded()
  local text = redis.pcall('GET', map)
  local n, was = (type(text) == 'string' and text or ''):match('"n":(%d+),"was":(%d+)')
  return n and (n ~= '1' or was ~= '1')
end

-- Read at most about 2,000 ids at the heads of the lists, with their state words and retry counts.
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
    -- Read more ids than may start, so that this call can skip cancelled or postponed messages at the head of the list.
    row.reach = math.min(math.ceil(room * row.weight / all_weights), row.most) + (row.key == '' and 0 or more)
    row.ids, row.first = row.most > 0 and read('LRANGE', row.list, -row.reach, -1) or {}, #all
    for _, id in ipairs(row.ids) do all[#all + 1] = id end
  end
  return #all > 0 and read('HMGET', lease, unpack(all)), #all > 0 and read('HMGET', retries_left, unpack(all))
end

-- Serve the lists in turns, the list with the lowest pass first, until `room` messages have started. The function
-- `meet` decides on a message and returns whether it starts.
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
        if purse_read and purse_read.is_short then return end
        if not row.stops then row.at = row.at + 1 end
        if started then row.started, room = row.started + 1, room - 1 end
        if started or row.stops then row.pass, row.is_moved = row.pass + 1 / row.weight, true end
      end
      if row.started < row.most and row.at < #row.ids and not row.stops then on[#on + 1] = row end
    end
    rows = on
  end
end

-- Remove the messages that were passed to `meet` from their lists. Remove a key from the ring if its key queue is
-- empty, or if its limit allows no more starts. If this call has read a whole list and removes all its ids, the list is
-- empty. But if the call has found `misplaced` messages, which it adds to the queues of their own keys, check in Redis
-- whether the list is empty.
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
  -- If ready and retry are empty, remove their pass from the ring. New keys start near the lowest pass in the ring, and
  -- must not start with an old pass.
  if redis.call('EXISTS', ready, retry) == 0 then
    redis.call('ZREM', ring, '')
  elseif own then
    redis.call('ZADD', ring, string.format('%.17g', own), '')
  end
end

-- Check keys that are throttled by their rate. If the rate of a key allows a start now, serve the key again; otherwise
-- update the time of the key's next start.
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

-- Return the next part of a sorted set, and the cursor of the part after it (`-`: none).
local function part_of(zset, cursor)
  if cursor == '-' then return {}, cursor end
  local part = redis.call('ZSCAN', zset, cursor, 'COUNT', 1000)
  return part[2], part[1] == '0' and '-' or part[1]
end

-- After a change of the limits, check some of the keys that the old limits blocked. The field `walk` stores the cursors
-- in `held` and `asleep` at which the next call continues.
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

-- Delete at most `most` token buckets that are full, because a missing bucket also counts as full.
local function forget_buckets(most)
  run('ZREM', rates, redis.call('ZRANGEBYSCORE', rates, '-inf', '(' .. string.format('%.0f', us), 'LIMIT', 0, most))
end

-- Take the starts of this claim from the token buckets, and throttle keys that have used up their rate. Return whether
-- the next start is earlier than the watcher expects, and whether a rate is used up. If the clock went back and a
-- bucket was reduced, store the bucket too.
local function spend(rows, n)
  local buckets, sleeps, first, may, full = {}, {}, head(asleep), bucket('')
  local is_short = purse() and purse_read.is_short
  local is_limited = may == n or is_short
  local is_sooner = is_short or is_limited and n > 0
  if purse() then purse_read.keep(buckets) end
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
  -- Delete twice as many full buckets as this call adds. So the buckets of keys that are used only once soon disappear.
  if limits_now().key_rate_us and #buckets > 0 then forget_buckets(#buckets) end
  run('ZADD', rates, buckets)
  run('ZADD', asleep, sleeps)
  return is_sooner, is_limited
end

-- Refund the token buckets for messages that were claimed but never ran, and stop throttling their keys. Subtract from
-- the refund the tokens that a bucket has gained since the oldest claim, because they would count twice.
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
  -- If the rate of a key still allows no start, the next claim throttles the key again.
  run('ZREM', asleep, throttled)
  ring_in(throttled)
  if #buckets > 0 and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end
end

-- Return the number of messages in ready and retry plus the number of keys that may be served; 0 if no message may
-- start.
local function waiting_now()
  if queue_room() == 0 then return 0 end
  return redis.call('LLEN', ready) + redis.call('LLEN', retry) + keys_in_ring()
end

-- Return the ms until the first of these events: a message is due (`wait`), the throttling of a key ends, or the
-- queue's rate allows a start.
local function until_more(wait)
  if wait == -2 then return wait end
  if limits_now().walk then return 0 end
  local due, may, full = head(asleep), bucket('')
  if may == 0 then due = math.min(due or math.huge, next_start('', full)) end
  if purse() and purse_read.waits > us then due = math.min(due or math.huge, math.ceil(purse_read.waits / 1000)) end
  local more = due and math.max(0, math.min(due - now_down, 86400000)) or wait
  return wait < 0 and more or math.min(wait, more)
end

-- Serve the lists until `room` messages have started. Return a table (row) for each served list.
local function serve(lengths, room, meet)
  room = math.min(room, queue_room())
  local rows = room > 0 and rows_of(lengths, room) or {}
  take_turns(rows, room, meet, read_rows(rows, room))
  return rows
end

-- Split the ids of due messages into two lists: messages that go to the tail of their list, and ordered messages, which
-- return to the head because they have stayed in `held`.
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

-- Return the keys whose throttling is over, and the keys that are throttled for too long because the clock went back.
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

-- Throttle the keys of messages until a time, except keys that are throttled for longer. A message without a key
-- throttles the whole queue.
local function put_to_sleep(ids, until_then)
  local keys = {}
  for _, id in ipairs(ids) do
    local key = priorities[key_of[id]] and '' or key_of[id]
    if ms_of(redis.call('ZSCORE', asleep, key) or 0) < until_then then keys[#keys + 1] = key end
  end
  put(asleep, until_then, keys)
  run('ZREM', ring, keys)
end

-- Return whether an entry in `held` is wrong: its message is not leased, and is not an ordered message that waits.
local function is_stray(key, id)
  local text, word, deadline = redis.call('HGET', retries_left, id), redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local own, is_waiting = place(key_in(text), id), redis.call('ZSCORE', pending, id) or (deadline and waits(word))
  if key == '\2' then return not (is_waiting and redis.call('ZSCORE', held, own)) end
  local is_kept = is_waiting and redis.call('ZSCORE', held, place('\2', id))
  return not text or place(key, id) ~= own or not ((deadline and not waits(word)) or is_kept)
end
