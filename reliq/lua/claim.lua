-- claim: ready -> unack, retry -> unack
--
-- KEYS  lane? ready? retry? unack pending retries_left? lease? errors? totals ends wake watch paused token?
-- ARGV  clock number nonce lease_ms limit first direct slots suspects narrowest watcher keyed_limit spread
-- Runs  lane:DEL,GET,SET ready:LLEN,LPUSH,LRANGE,LTRIM retry:LLEN,LPUSH,LRANGE,LTRIM unack:ZADD,ZRANGE,ZSCORE
--       pending:ZADD,ZRANGE retries_left:HDEL,HGET,HMGET lease:HDEL,HGET,HMGET,HSET errors:HDEL,HLEN,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH,LTRIM watch:DEL,GET,PTTL,SET paused:EXISTS token:GET,SET
-- Keyed  ready:EXISTS retry:EXISTS unack:ZREM retries_left:HLEN lease:HLEN limits:HGET,HMGET ring:EXISTS,ZADD,ZCARD,ZRANGE,ZREM,ZSCORE
--       held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZADD,ZMSCORE,ZRANGE,ZSCORE rates:ZADD,ZRANGEBYSCORE,ZREM,ZSCORE
--       line:EXISTS,LPUSH,LRANGE,LTRIM
-- Returns  ms until pending and until unack are due (-1: none, -2: another process watches), how many ids
--          (and keys) are left to be served, the token of the claim (0 of one without ids), the key of each claimed (nil
--          where the queue has no keys), then id, retries left, deaths in a row for each claimed
-- Nothing to do: no ids. A repeated number gets those of its ids that still carry its nonce, with a new deadline.
--
-- `first` is the list to begin with. At most `direct` messages are taken that must not wait in a buffer: suspects,
-- and those with no retry left. Suspects are narrowed: of the `slots` of a process half run one that was in one death,
-- a quarter those of two; then, and on its last delivery, one runs with no other suspect beside it. `suspects` are held
-- there already, and `narrowest` is the least room of one of them. The others go to the far end of their list.

limit, direct = tonumber(limit), tonumber(direct)
-- `taken` is what is answered and kept: the token, the keys, then three values for each claimed.
local claimed, taken, deadlines, words, deadline = {}, { 0, false }, {}, {}, score(now_up + lease_ms)
local met, dropped, moved, dues, behind = {}, {}, {}, {}, read('LLEN', ready) + read('LLEN', retry)

local function keep(id, left, died)
  local n = #claimed + 1
  claimed[n], deadlines[2 * n - 1], deadlines[2 * n] = id, deadline, id
  words[2 * n - 1], words[2 * n] = id, word_of(died)
  taken[3 * n], taken[3 * n + 1], taken[3 * n + 2] = id, left, died
end

local again, known
if limit > 0 then again, known = recall() end
if again == 'stale' then return { -2, -2, 0, 0, false } end
local before = again and again ~= '' and cmsgpack.unpack(again) or taken
for i = 3, #before, 3 do
  local id, died = before[i], before[i + 2]
  if read('HGET', lease, id) == word_of(died) and redis.call('ZSCORE', unack, id) then
    keep(id, count(read('HGET', retries_left, id)), died)
  end
end

-- Each of the oldest ids of the lists has its fate before anything is written.
local lists = first == 'retry' and { retry, ready } or { ready, retry }
for _, list in ipairs(not again and redis.call('EXISTS', paused) == 0 and lists or {}) do
  local ids, back = limit > #claimed and redis.call('LRANGE', list, #claimed - limit, -1) or {}, {}
  local states, lefts = #ids > 0 and read('HMGET', lease, unpack(ids)), #ids > 0 and read('HMGET', retries_left, unpack(ids))
  for i = #ids, 1, -1 do
    local id, word, left = ids[i], states[i], count(lefts[i])
    local died, due = word and deaths(word) or 0, word and word:match('^@(%d+)')
    local is_direct = died > 0 or left == 0
    if cancelled(word) then
      dropped[#dropped + 1] = read('HLEN', errors) and id
    elseif due then
      moved[#moved + 1], dues[#dues + 1] = id, due
    elseif (is_direct and direct == 0) or not may_run(died, left) then
      back[#back + 1] = id
    else
      direct = direct - (is_direct and 1 or 0)
      keep(id, left, died)
    end
  end
  met[#met + 1] = #ids > 0 and { list = list, size = #ids, back = back } or nil
end

-- The first write is a removal of nothing, as with `begin`.
for _, one in ipairs(met) do redis.call('LTRIM', one.list, 0, -1) end
taken[1] = again and before[1] or #claimed > 0 and new_token() or 0
if known then redis.call('DEL', lane) end
run('ZADD', unack, deadlines)
run('HSET', lease, words)
-- A claim of nothing leaves no lane behind.
if #claimed > 0 or known then remember(#claimed > 0 and cmsgpack.pack(taken) or '', lease_ms) end
put(pending, dues, moved)
for _, one in ipairs(met) do
  run('LPUSH', one.list, one.back)
  redis.call('LTRIM', one.list, 0, -one.size - 1)
  behind = behind - one.size + #one.back
end
run('HDEL', lease, moved)
finish('cancelled', dropped)

local promote_in, reclaim_in = watch_for(pending, unack)
if behind > 0 and #claimed + #dropped + #moved > 0 then push_token() end
-- Many tokens, of whomever, would wake somebody for nothing as often.
if #claimed == 0 and redis.call('LLEN', wake) > 1 then redis.call('LTRIM', wake, 0, 0) end
if not again then add('claimed', #claimed) end
return { promote_in, reclaim_in, behind, unpack(taken) }
