-- claim: lease the oldest messages in ready and retry, and in key queues if the queue has message keys
--
-- KEYS  lane? ready? retry? unack pending retries_left? lease? errors? totals ends wake watch paused token?
-- ARGV  clock number nonce lease_ms limit first direct slots suspects narrowest watcher keyed_limit spread
-- Runs  lane:DEL,GET,SET ready:LLEN,LPUSH,LRANGE,LTRIM retry:LLEN,LPUSH,LRANGE,LTRIM unack:ZADD,ZRANGE,ZREM,ZSCORE
--       pending:ZADD,ZRANGE retries_left:HDEL,HGET,HMGET lease:HDEL,HGET,HMGET,HSET errors:HDEL,HLEN,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH,LTRIM watch:DEL,GET,PTTL,SET paused:EXISTS token:GET,SET
-- Keyed  ready:EXISTS retry:EXISTS limits:HGET,HMGET ring:EXISTS,ZADD,ZCARD,ZRANGE,ZREM,ZSCORE
--       held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZADD,ZMSCORE,ZRANGE,ZSCORE rates:ZADD,ZRANGEBYSCORE,ZREM,ZSCORE
--       line:EXISTS,LPUSH,LRANGE,LTRIM
-- Returns  the ms until the next message in pending is due, and the ms until the next deadline in unack (-1: there is
--          none; -2: another process waits for it); how many ids and keys are left to claim; the fencing token of the
--          claim (0 if no message is claimed); the keys of the claimed messages (nil in a queue without keys); then for
--          each claimed message its id, its retries left, and how many of its deliveries in a row ended with an expired
--          lease.
-- Nothing to do: if no message can be claimed, returns no messages. A repeated script call returns the messages that
--          its first call has claimed and that are still leased, with new deadlines.
--
-- `first` is the list to claim from first. A suspect is a message whose last delivery ended with an expired lease (a
-- death), so it may have killed its worker process. Suspects and messages without retries left must start immediately
-- and must not be prefetched, so the script claims at most `direct` of them.
--
-- To limit the damage, few suspects run at the same time in a process. After one death, suspects may use half of the
-- `slots` of the process; after two deaths, a quarter. After more deaths, or at its last delivery, a suspect runs
-- without other suspects. The process already has `suspects` suspects, and `narrowest` is the lowest of their limits. A
-- suspect that must wait moves to the tail of its list.
--
-- In a queue with keys, the script claims in turns from the key queues and from `ready` and `retry`, which count as one
-- list. If the first message of a key queue must wait, the other messages of the key wait too. The script claims from
-- at most `spread` keys and at most `keyed_limit` messages, within the limits of the queue. The rate limit by cost
-- counts the cost of each claimed message; the script stops at a message whose cost is too high now. If the limits
-- allow the next start before the next message in `pending` is due, the script returns the time until this start
-- instead. If the start is earlier than the watcher (the process that waits for the next due time) expects, the process
-- of this claim becomes the watcher.

limit, direct = tonumber(limit), tonumber(direct)
-- keyed: limit, spread = tonumber(keyed_limit), tonumber(spread)
-- `taken` is the part of the reply that Redis stores for a repeated script call: the fencing token, the keys, then
-- three values for each claimed message.
local claimed, taken, deadlines, words, deadline = {}, { 0, false }, {}, {}, score(now_up + lease_ms)
local dropped, marks, moved, dues, misplaced = {}, {}, {}, {}, {}
local lengths = { [ready] = read('LLEN', ready), [retry] = read('LLEN', retry) }
-- keyed: local keys, places = {}, {}
-- keyed: taken[2] = keys

local function keep(id, left, died, key)
  local n = #claimed + 1
  claimed[n], deadlines[2 * n - 1], deadlines[2 * n] = id, deadline, id
  words[2 * n - 1], words[2 * n] = id, word_of(died)
  taken[3 * n], taken[3 * n + 1], taken[3 * n + 2] = id, left, died
  -- keyed: keys[n], key_of[id] = key, key
  -- keyed: pair(places, 0, place(key, id))
end

-- Decide what happens to a message in a list: whether it is claimed, ends because it was cancelled or purged, moves (to
-- `pending`, to the queue of its own key, or to the tail of its list), or stays in its place. Return true if it is
-- claimed. The script writes these changes to Redis later.
local function meet(row, id, word, text)
  local left, died, due, key = count(text), 0, nil, nil
  if word then died, due = deaths(word), word:match('^@(%d+)') end
  -- keyed: key = text and key_in(text) or row.key
  local is_direct = died > 0 or left == 0
  if cancelled(word) then
    dropped[#dropped + 1], marks[id] = read('HLEN', errors) and id, word
  elseif due then
    moved[#moved + 1], dues[#dues + 1] = id, due
  -- keyed: elseif key ~= row.key then
    -- keyed: misplaced[#misplaced + 1], key_of[id] = id, key
  elseif is_direct and (direct == 0 or not may_run(died, left)) then
    -- A message with a key stays at the head of its key queue, so its key waits. Other messages move to the tail.
    -- keyed: row.stops = key ~= ''
    if not row.stops then row.back[#row.back + 1] = id end
  -- keyed: elseif purse() and not purse_read.pay(cost_in(text)) then
    -- keyed: row.stops = true
  else
    direct = direct - (is_direct and 1 or 0)
    keep(id, left, died, key)
    return true
  end
end

local again, known
if limit > 0 then again, known = recall() end
if again == 'stale' then return { -2, -2, 0, unpack(taken) } end
local before = again and again ~= '' and cmsgpack.unpack(again) or taken
for i = 3, #before, 3 do
  local id, died = before[i], before[i + 2]
  if read('HGET', lease, id) == word_of(died) and redis.call('ZSCORE', unack, id) then
    keep(id, count(read('HGET', retries_left, id)), died, before[2] and before[2][i / 3] or '')
  end
end
local is_paused = not again and redis.call('EXISTS', paused) == 1
local rows = serve(lengths, (again or is_paused) and 0 or limit, meet)

begin(unack)
taken[1] = again and before[1] or #claimed > 0 and new_token() or 0
if known then redis.call('DEL', lane) end
-- keyed: local is_sooner, is_limited = spend(rows, again and 0 or #claimed)
-- keyed: run('ZADD', held, places)
run('ZADD', unack, deadlines)
run('HSET', lease, words)
-- If no message was claimed, store the reply only if Redis has an earlier reply of the same lane (the client's sequence
-- of calls), which must be replaced.
if #claimed > 0 or known then remember(#claimed > 0 and cmsgpack.pack(taken) or '', lease_ms) end
put(pending, dues, moved)
-- keyed: line_up(misplaced)
leave_rows(rows, misplaced)
-- keyed: free_places(misplaced)
run('HDEL', lease, moved)
by_end(dropped, marks, finish)

local behind = lengths[ready] + lengths[retry]
for _, row in ipairs(rows) do behind = behind - row.at + #row.back end
-- keyed: behind = waiting_now()
-- With `limit` 0, a worker only reads the backlog, before it books starts under a limit that several queues share. So
-- report no backlog for a paused queue, because its messages cannot start.
if is_paused and limit == 0 then behind = 0 end
-- keyed: if is_sooner then redis.call('DEL', watch) end
local promote_in, reclaim_in = watch_for_due()
-- keyed: promote_in = until_more(promote_in)
if behind > 0 and #claimed + #dropped + #moved + #misplaced > 0 then push_token() end
-- Keep only one entry in `wake`: each entry wakes a worker process, and this claim has found no message.
if #claimed == 0 and redis.call('LLEN', wake) > 1 then redis.call('LTRIM', wake, 0, 0) end
if not again then add('claimed', #claimed) end
-- keyed: if is_limited and limit > 0 and not again then add('limited', 1) end
return { promote_in, reclaim_in, behind, unpack(taken) }
