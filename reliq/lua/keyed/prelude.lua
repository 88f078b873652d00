-- Lua functions for queues with message keys or limits. A function in this file replaces the function with the same
-- name in ../prelude.lua. In this file, "key" means a message key.
--
-- The hash `retries_left` stores a message's key after its number of retries: `12 tenant-7`. A cost other than 1
-- follows the key: `12 tenant-7\3800`. A message without a key has the empty text as its key. Messages with a priority
-- have the reserved key \1high or \1low. Publishers cannot use these keys, because message keys contain no control
-- characters.
--
-- A key queue is a list of the waiting messages of a key, with the oldest message at the right end. The sorted set
-- `ring` has the keys whose messages may be claimed. The score of a key in `ring` is called its pass: messages of the
-- key with the lowest pass are claimed next, and each claimed message raises the pass of its key by 1 / weight. The
-- pass of the empty key applies to `ready` and `retry`.
--
-- The sorted set `held` has an entry KEY\0ID for each message that counts against the concurrency limit of its key. A
-- script adds the entry before it leases the message, and removes it after the lease has ended. In an ordered queue, a
-- message keeps this entry while it waits after a nack or a snooze, so no other message of the key starts. It then also
-- has the entry \2\0ID, which shows that it does not run.
--
-- The sorted set `asleep` has the throttled and paused keys, with the times when they end. It has the empty key if the
-- whole queue is throttled.

local key_of, priorities, limits_read, purse_read = {}, { ['\1high'] = 4, ['\1low'] = 0.25 }, nil, nil

-- Read and write the text that `retries_left` stores for a message, such as `12 tenant-7\3800`: its number of retries,
-- key and cost. Key and cost together (`tenant-7\3800`) are called the line of the message.
local function line_in(text) return text and text:match('^%-?%d+ (.+)$') or '' end
local function key_in(text) return text and text:match('^%-?%d+ ([^\3]+)') or '' end
local function cost_in(text) return tonumber((text or ''):match('\3(%d+)$') or 1) end
local function left_in(text) return text and text:match('^%-?%d+ .') and text:match('^%-?%d+') or text end
local function key_of_line(its_line) return its_line:match('^[^\3]*') end
local function counted(left, its_line) return its_line == '' and left or left .. ' ' .. its_line end

-- Return the line of a message (its key and cost) from the header of its stored value. Return an empty text if the
-- header has no valid line.
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

-- Return the concurrency limit of a key: how many of its messages may run at the same time. Return nil without a limit.
local function places_of(key) return key ~= '' and not priorities[key] and limits_now().per_key or nil end
local function places_free(key)
  local most = places_of(key)
  return most and most - in_flight(key) or math.huge
end
local function weight_of(key)
  local weight = limits_now().weighted and tonumber(redis.call('HGET', limits, 'weight:' .. key) or '')
  return weight and weight > 0 and weight or priorities[key] or 1
end

-- Return the rate limit of a key: the us between two starts, and the burst. For the empty key, return the rate limit of
-- the whole queue.
local function rate_of(key)
  local conf = limits_now()
  if key == '' then return conf.rate_us, conf.burst end
  if not priorities[key] then return conf.key_rate_us, conf.key_burst end
end

-- Read the token bucket of a key's rate limit. Return how many messages may start now (`math.huge` without a limit),
-- and when the bucket will be full again, in unix us. If Redis' clock was set back, the stored time is too late. Then
-- use the time at which an empty bucket would be full.
local function bucket(key)
  local every, burst = rate_of(key)
  if not every then return math.huge end
  local full = math.min(math.max(tonumber(redis.call('ZSCORE', rates, key) or 0), us), us + every * burst)
  return math.max(0, math.floor(burst - (full - us) / every + 1e-6)), full
end

-- Return when the rate limit of a key allows the next start, in unix ms. `full` is the time when the token bucket of
-- this limit will be full again, in unix us.
local function next_start(key, full)
  local every, burst = rate_of(key)
  return math.ceil((full - (burst - 1) * every) / 1000)
end

-- Return whether a key in the sorted set `asleep` is throttled by its rate limit, and not by a handler or an operator.
-- `until_then` is the key's score, the end of the throttling. `throttle` adds 0.2 ms to the scores of such keys.
local function is_throttled(until_then) return until_then and until_then * 10000 - ms_of(until_then) * 10 > 1 end
local function throttle(sleeps, buckets, key, full)
  pair(sleeps, score(next_start(key, full)) .. '2', key)
  pair(buckets, string.format('%.0f', full), key)
end

-- Return a table for the token bucket of the queue's rate limit by cost, or nil without such a limit. `full` is the
-- time when the bucket will be full again. If the bucket cannot pay for the next message, `waits` is the time when it
-- can. If jobs report a higher cost with `job.spent`, the bucket may be in debt, by at most its burst.
local function purse()
  local conf = limits_now()
  if not conf.cost_ns or purse_read then return purse_read end
  local every = conf.cost_ns / 1000
  local whole = every * (tonumber(redis.call('HGET', limits, 'cost_burst') or '') or 1)
  local most = us + 2 * whole
  local full, waits = tonumber(redis.call('ZSCORE', rates, '\3') or 0), tonumber(redis.call('ZSCORE', rates, '\4') or 0)
  local costs = { every = every, most = most, full = math.min(math.max(full, us), most), waits = math.min(waits, most) }
  -- If a stored time is after `most`, Redis' clock was set back. Then cut the time to `most`.
  local is_cut, is_spent = math.max(full, waits) > most, false

  -- If this script call has changed the token bucket, add its new times to the list `buckets`. The caller writes this
  -- list to Redis.
  function costs.keep(buckets)
    if is_spent or is_cut then pair(buckets, string.format('%.0f', math.ceil(costs.full)), '\3') end
    if costs.is_short or is_cut then pair(buckets, string.format('%.0f', costs.waits), '\4') end
  end

  -- Take the cost of a message from the token bucket, and return whether the bucket had enough. If not, set `waits` to
  -- the time when the bucket will have enough. No message of the queue starts until then, because otherwise cheap
  -- messages would always overtake an expensive message. If the cost is higher than the burst, a full bucket is enough.
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

-- While the token bucket of the rate limit by cost has too little for the next message, claims wait until a stored
-- time. Delete this time after a refund or after waiting messages were removed, so that the next claim checks the
-- bucket again.
local function price_head()
  if redis.call('ZREM', rates, '\4') == 1 then push_token() end
end

-- Correct the token bucket of the rate limit by cost with the real costs that jobs have reported. The argument `key` of
-- such a message is `KEY\3COST CLAIM`, where CLAIM is the time of the claim (the fencing token). If a message cost less
-- than its claim has taken from the bucket, return the difference to the bucket. But subtract the amount that the
-- bucket has gained since the claim: without the claim, the bucket could have been full and would have gained nothing.
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

-- `running` returns how many messages of the queue run. `queue_room` returns how many more messages the limits
-- of the queue allow to start now. It returns 0 while the whole queue is throttled.
local function running() return redis.call('ZCARD', held) - 2 * in_flight('\2') end
local function queue_room()
  local room, concurrency, sleeps = bucket(''), limits_now().concurrency, redis.call('ZSCORE', asleep, '')
  if concurrency then room = math.max(0, math.min(room, concurrency - running())) end
  if purse() and purse_read.waits > us then room = 0 end
  return sleeps and ms_of(sleeps) > now_down and 0 or room
end

-- Wake a waiting worker process if the queue's limits allow a message to start now.
local function offer()
  if queue_room() > 0 then push_token() end
end

local function keys_in_ring() return redis.call('ZCARD', ring) - (redis.call('ZSCORE', ring, '') and 1 or 0) end

-- Add keys to `ring`, so that their messages can be claimed. Skip a key if no message of the key waits, if the key is
-- at its concurrency limit, or if it is throttled or paused.
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

-- Group message ids by their keys. Return a list of the keys, each once and without the empty key, and a table with the
-- ids of each key, including the empty key.
local function by_key(ids)
  local keys, some = {}, { [''] = {} }
  for _, id in ipairs(ids) do
    local key = key_of[id] or ''
    if not some[key] then keys[#keys + 1], some[key] = key, {} end
    table.insert(some[key], id)
  end
  return keys, some
end

-- Add due messages to the tails of their key queues, and messages without a key to `ready`.
local function line_up(ids)
  local keys, some = by_key(ids)
  local woken = {}
  if run('LPUSH', ready, some['']) then offer() end
  for _, key in ipairs(keys) do
    if run('LPUSH', line .. key, some[key]) == #some[key] then woken[#woken + 1] = key end
  end
  ring_in(woken)
end

-- Add new messages to their key queues, or to `pending` if they are due later. Messages of a key with the same due time
-- must keep their order in `pending`. So the score of each message is at least half a us above the score of the
-- previous message of its key. A script call with 500 messages of a key needs 500 such steps. If earlier messages
-- have used the first 500 steps after the due time, begin in a later ms, less than 20 ms after the due time.
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

-- Find the list that still contains a cancelled message, and return the list and the message's key. Return nil if the
-- message is not near the head of this list.
local function old_place(id)
  local key = key_in(redis.call('HGET', retries_left, id))
  local list = key == '' and ready or line .. key
  return read('LPOS', list, id, 'RANK', -1, 'MAXLEN', math.ceil(100000 / ITEMS)) and { list, key } or nil
end

-- If new messages have the ids of cancelled messages, remove the cancelled messages from their old lists. `enter` has
-- already added the new messages to the tails of their key queues. Also add the ids to the list `ids`.
local function leave_old(places, ids)
  for id, from in pairs(places) do
    redis.call('LREM', from[1], -1, id)
    if redis.call('EXISTS', from[1]) == 0 then redis.call('ZREM', ring, from[2]) end
    ids[#ids + 1] = id
  end
end

-- Return messages to the heads of their key queues, so that the first message of `ids` is claimed first. Return the ids
-- of messages without a key.
local function come_back(ids)
  local keys, some = by_key(ids)
  for _, key in ipairs(keys) do run('RPUSH', line .. key, reversed(some[key])) end
  return some['']
end

-- Let workers claim messages for their redelivery: add them to the heads of their key queues, or to `retry` if they
-- have no key.
local function redeliver(ids)
  if run('LPUSH', retry, come_back(ids)) then offer() end
end

-- After messages have ended, wake a worker process: if the queue has a concurrency limit, more messages may start now.
local function offer_places()
  if limits_now().concurrency and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end
end

-- Store the keys of messages in the table `key_of`. The arguments of the script call have these keys. Ignore messages
-- with an invalid receipt: an earlier message with the same id may have had another key.
local function note_keys(receipt_of)
  for id, i in pairs(receipt_of) do
    if i then key_of[id] = key_of_line(line_arg(i)) end
  end
end

-- Remove messages from the sorted set `held`, so that they no longer count against the limits of the queue. Then other
-- messages of their keys may start.
local function free_places(ids)
  if #ids == 0 then return end
  local away = {}
  for _, id in ipairs(ids) do pair(away, place(key_of[id] or '', id), place('\2', id)) end
  redis.call('ZREM', held, unpack(away))
  ring_in((by_key(ids)))
  offer_places()
end

-- After messages begin to wait for their redelivery, remove them from the sorted set `held`, so that other messages of
-- their keys may start. In an ordered queue, keep them in `held`, so that no other message of their keys starts.
local function stand_by(ids)
  local free, kept, is_ordered = {}, {}, limits_now().ordered
  for _, id in ipairs(ids) do
    if is_ordered and places_of(key_of[id] or '') then pair(kept, 0, place('\2', id)) else free[#free + 1] = id end
  end
  if run('ZADD', held, kept) then offer_places() end
  free_places(free)
end

-- Return the lists from which this claim takes messages, with the lowest pass first: `ready`, `retry` and the key
-- queues of the first keys in `ring`. They are at most `spread` keys, where the messages without a key count as one
-- key.
local function rows_of(lengths, room)
  local rows, own, at = {}, nil, 1
  local found = redis.call('ZRANGE', ring, 0, math.min(room, spread), 'WITHSCORES')
  for k = 1, #found, 2 do
    local key, pass = found[k], tonumber(found[k + 1])
    if key == '' then own = pass else rows[#rows + 1] = { key = key, list = line .. key, pass = pass } end
  end
  own = own or tonumber(redis.call('ZSCORE', ring, '') or rows[1] and rows[1].pass or 0)
  -- If `ready` and a key queue have the same pass, `ready` comes first. In a queue with a rate limit by cost, the key
  -- queue comes first: otherwise messages without a key would always overtake an expensive message with a key.
  while rows[at] and (rows[at].pass < own or rows[at].pass == own and purse()) do at = at + 1 end
  -- `ready` and `retry` have the same pass, so they count as one list.
  local most = spread
  for _, list in ipairs(first == 'retry' and { ready, retry } or { retry, ready }) do
    if lengths[list] > 0 then table.insert(rows, at, { key = '', list = list, pass = own }) end
  end
  if at <= spread and lengths[ready] > 0 and lengths[retry] > 0 then most = spread + 1 end
  while #rows > most do table.remove(rows) end
  return rows
end

-- Return whether the queue has several shards, or had several shards before its current resize.
local function is_sharded()
  local text = redis.pcall('GET', map)
  local n, was = (type(text) == 'string' and text or ''):match('"n":(%d+),"was":(%d+)')
  return n and (n ~= '1' or was ~= '1')
end

-- For a claim, read the ids at the heads of the lists, at most about 2,000 in total. Return the values of these ids in
-- the hashes `lease` and `retries_left`.
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
    -- Read more ids than may start, because cancelled and postponed messages at the head of the list do not start.
    row.reach = math.min(math.ceil(room * row.weight / all_weights), row.most) + (row.key == '' and 0 or more)
    row.ids, row.first = row.most > 0 and read('LRANGE', row.list, -row.reach, -1) or {}, #all
    for _, id in ipairs(row.ids) do all[#all + 1] = id end
  end
  return #all > 0 and read('HMGET', lease, unpack(all)), #all > 0 and read('HMGET', retries_left, unpack(all))
end

-- Claim messages from the lists in turns, from the list with the lowest pass first, until `room` messages are claimed.
-- The function `meet` decides whether a message is claimed, and returns true if it is.
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

-- After a claim, remove the messages that were passed to `meet` from their lists, and store the new passes of the keys
-- in `ring`. Remove a key from `ring` if its key queue is empty, or if its limits allow no more starts. A key queue is
-- empty if the claim has read the whole list and has removed all its ids. If there are `misplaced` messages, which the
-- claim has moved to the queues of their own keys, ask Redis whether the list is empty.
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
  -- If `ready` and `retry` are empty, remove their pass from `ring`. New keys get a pass near the lowest pass in
  -- `ring`, so an old pass must not stay there.
  if redis.call('EXISTS', ready, retry) == 0 then
    redis.call('ZREM', ring, '')
  elseif own then
    redis.call('ZADD', ring, string.format('%.17g', own), '')
  end
end

-- Check keys that are throttled by their rate limit. If the rate limit of a key allows a start now, end the throttling
-- of the key. Otherwise update the time when its throttling ends.
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

-- Scan a part of a sorted set, beginning at `cursor`. Return the members with their scores, and the cursor of the next
-- part, or `-` at the end of the sorted set.
local function part_of(zset, cursor)
  if cursor == '-' then return {}, cursor end
  local part = redis.call('ZSCAN', zset, cursor, 'COUNT', 1000)
  return part[2], part[1] == '0' and '-' or part[1]
end

-- After the limits of a queue were changed, check whether they allow starts of keys that the old limits blocked. Each
-- script call checks a part of these keys. The field `walk` of the hash `limits` stores the scan cursors of `held` and
-- `asleep` for the next script call.
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

-- Delete at most `most` token buckets that are full again. A token bucket that Redis does not store counts as full.
local function forget_buckets(most)
  run('ZREM', rates, redis.call('ZRANGEBYSCORE', rates, '-inf', '(' .. string.format('%.0f', us), 'LIMIT', 0, most))
end

-- After a claim, subtract the started messages from the token buckets of the rate limits, and throttle the keys that
-- have used up their rate limit. Return whether the next start is earlier than the watcher (the process that waits for
-- the next due time) expects, and whether a rate limit is used up. Also store the buckets that were corrected because
-- Redis' clock was set back.
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
  -- `buckets` has two values for each bucket, so this deletes up to twice as many full buckets as the claim adds. In
  -- this way, the buckets of keys that are used only once are soon deleted.
  if limits_now().key_rate_us and #buckets > 0 then forget_buckets(#buckets) end
  run('ZADD', rates, buckets)
  run('ZADD', asleep, sleeps)
  return is_sooner, is_limited
end

-- Return the tokens of messages that were claimed but never ran to the token buckets of the rate limits, and end the
-- throttling of their keys. But subtract the tokens that a bucket has gained since the oldest of these claims: without
-- the claims, the bucket could have been full and would have gained nothing.
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
  -- If the rate limit of a key still allows no start, the next claim throttles the key again.
  run('ZREM', asleep, throttled)
  ring_in(throttled)
  if #buckets > 0 and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end
end

-- Return how much is left to claim: the number of messages in `ready` and `retry`, plus the number of keys in `ring`.
-- Return 0 if the limits of the queue allow no start now.
local function waiting_now()
  if queue_room() == 0 then return 0 end
  return redis.call('LLEN', ready) + redis.call('LLEN', retry) + keys_in_ring()
end

-- Return the ms until the next `promote` or claim is useful: until a message is due (after `wait` ms), the throttling
-- of a key ends, or the queue's rate limit allows a start, whichever is first.
local function until_more(wait)
  if wait == -2 then return wait end
  if limits_now().walk then return 0 end
  local due, may, full = head(asleep), bucket('')
  if may == 0 then due = math.min(due or math.huge, next_start('', full)) end
  if purse() and purse_read.waits > us then due = math.min(due or math.huge, math.ceil(purse_read.waits / 1000)) end
  local more = due and math.max(0, math.min(due - now_down, 86400000)) or wait
  return wait < 0 and more or math.min(wait, more)
end

-- Claim messages from `ready`, `retry` and key queues, until `room` messages are claimed. Return a table for each of
-- these lists, which has the ids that were read and how many of them were passed to `meet`.
local function serve(lengths, room, meet)
  room = math.min(room, queue_room())
  local rows = room > 0 and rows_of(lengths, room) or {}
  take_turns(rows, room, meet, read_rows(rows, room))
  return rows
end

-- Split the ids of due messages into two lists. Messages of the first list go to the tail of `ready` or of their key
-- queue. The second list has snoozed messages of an ordered queue, which return to the head of their key queue.
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

-- Return two lists of keys: the keys whose throttling has ended, and the keys that are throttled for too long because
-- Redis' clock was set back.
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

-- Throttle the keys of messages until the time `until_then`, except keys that are already throttled for longer. A
-- message without a key throttles the whole queue.
local function put_to_sleep(ids, until_then)
  local keys = {}
  for _, id in ipairs(ids) do
    local key = priorities[key_of[id]] and '' or key_of[id]
    if ms_of(redis.call('ZSCORE', asleep, key) or 0) < until_then then keys[#keys + 1] = key end
  end
  put(asleep, until_then, keys)
  run('ZREM', ring, keys)
end

-- Return whether the sorted set `held` has an entry by mistake, for example because Redis stopped in the middle of a
-- script: the message of the entry is not leased, and does not wait in an ordered queue.
local function is_stray(key, id)
  local text, word, deadline = redis.call('HGET', retries_left, id), redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local own, is_waiting = place(key_in(text), id), redis.call('ZSCORE', pending, id) or (deadline and waits(word))
  if key == '\2' then return not (is_waiting and redis.call('ZSCORE', held, own)) end
  local is_kept = is_waiting and redis.call('ZSCORE', held, place('\2', id))
  return not text or place(key, id) ~= own or not ((deadline and not waits(word)) or is_kept)
end
