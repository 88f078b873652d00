-- claim: ready, retry and the lines of keys -> unack
--
-- KEYS  lane? ready retry unack pending retries_left lease errors totals ends wake watch paused token? limits ring held asleep rates line
-- ARGV  clock number nonce lease_ms limit first direct slots suspects narrowest watcher spread
-- Runs  lane:DEL,GET,SET ready:EXISTS,LLEN,LPUSH,LRANGE,LTRIM retry:EXISTS,LLEN,LPUSH,LRANGE,LTRIM
--       unack:ZADD,ZRANGE,ZREM,ZSCORE
--       pending:ZADD,ZRANGE retries_left:HDEL,HGET,HMGET lease:HDEL,HGET,HMGET,HSET errors:HDEL,HLEN,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH,LTRIM watch:DEL,GET,PTTL,SET paused:EXISTS token:GET,SET
--       limits:HGET,HMGET ring:EXISTS,ZADD,ZCARD,ZRANGE,ZREM,ZSCORE held:ZADD,ZCARD,ZLEXCOUNT,ZREM asleep:ZADD,ZMSCORE,ZRANGE,ZSCORE
--       rates:ZADD,ZRANGEBYSCORE,ZREM,ZSCORE line:EXISTS,LPUSH,LRANGE,LTRIM
-- Returns  ms until pending and until unack are due (-1: none, -2: another process watches), how many ids and keys may be
--          served next, the token of the claim (0 of one without ids), then id, retries left, deaths in a row, key for each claimed
-- Nothing to do: no ids. A repeated number gets those of its ids that still carry its nonce, with a new deadline.
--
-- As the plain one, but the lists take turns, ready and retry as one of them, beginning with `first`; a line stops at a
-- message that must wait. At most `spread` keys have a turn. Nothing starts above the limits; the times at which they
-- permit more count as due times of pending: who makes them sooner watches for them, whoever watched before.

limit, direct, spread = tonumber(limit), tonumber(direct), tonumber(spread)
-- `taken` is what is answered and kept: the token, then four values for each claimed.
local claimed, taken, deadlines, words, places, deadline = {}, { 0 }, {}, {}, {}, score(now_up + lease_ms)
local dropped, moved, dues, misplaced = {}, {}, {}, {}

local function keep(id, left, died, key)
  local n = #claimed + 1
  claimed[n], key_of[id] = id, key
  pair(deadlines, deadline, id)
  pair(words, id, word_of(died))
  pair(places, 0, place(key, id))
  for i, value in ipairs({ id, left, died, key }) do taken[4 * n - 3 + i] = value end
end

-- Decide on a message: it starts, waits where it is, or has no business there.
local function meet(row, id, word, text)
  local left, died, due = count(text), word and deaths(word) or 0, word and word:match('^@(%d+)')
  local is_direct, key = died > 0 or left == 0, text and key_in(text) or row.key
  if cancelled(word) then
    dropped[#dropped + 1] = read('HLEN', errors) and id
  elseif due then
    moved[#moved + 1], dues[#dues + 1] = id, due
  elseif key ~= row.key then
    misplaced[#misplaced + 1], key_of[id] = id, key
  elseif (is_direct and direct == 0) or not may_run(died, left) then
    if key == '' then row.back[#row.back + 1] = id else row.stops = true end
  else
    direct = direct - (is_direct and 1 or 0)
    keep(id, left, died, key)
    return true
  end
end

local again, known
if limit > 0 then again, known = recall() end
if again == 'stale' then return { -2, -2, 0, 0 } end
local before = again and again ~= '' and cmsgpack.unpack(again) or taken
for i = 2, #before, 4 do
  local id, died = before[i], before[i + 2]
  if read('HGET', lease, id) == word_of(died) and redis.call('ZSCORE', unack, id) then
    keep(id, count(read('HGET', retries_left, id)), died, before[i + 3])
  end
end
local room, full = queue_room()
local rows = serve((again or redis.call('EXISTS', paused) == 1) and 0 or math.min(limit, room), meet)

begin(unack)
taken[1] = again and before[1] or #claimed > 0 and new_token() or 0
if known then redis.call('DEL', lane) end
local is_sooner, is_limited = spend(rows, full, again and 0 or #claimed)
run('ZADD', held, places)
run('ZADD', unack, deadlines)
run('HSET', lease, words)
if #claimed > 0 or known then remember(#claimed > 0 and cmsgpack.pack(taken) or '', lease_ms) end
put(pending, dues, moved)
line_up(misplaced)
leave_rows(rows, misplaced)
run('HDEL', lease, moved)
finish('cancelled', dropped)

if is_sooner then redis.call('DEL', watch) end
local promote_in, reclaim_in = watch_for(pending, unack)
local behind = waiting_now()
if behind > 0 and #claimed + #dropped + #moved + #misplaced > 0 then push_token() end
if #claimed == 0 and redis.call('LLEN', wake) > 1 then redis.call('LTRIM', wake, 0, 0) end
if not again then add('claimed', #claimed) add('limited', is_limited and limit > 0 and 1 or 0) end
return { until_more(promote_in), reclaim_in, behind, unpack(taken) }
