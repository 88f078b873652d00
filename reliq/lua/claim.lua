-- claim: ready -> unack, retry -> unack
--
-- KEYS  lane ready retry unack pending counts lease errors totals ends wake watch paused
-- ARGV  clock number nonce lease_ms limit first direct slots suspects narrowest watcher
-- Runs  lane:DEL,GET,SET ready:LLEN,LPUSH,LRANGE,LTRIM retry:LLEN,LPUSH,LRANGE,LTRIM unack:ZADD,ZRANGE,ZSCORE
--       pending:ZADD,ZRANGE counts:HDEL,HGET,HMGET lease:HDEL,HGET,HMGET,HSET errors:HDEL,HMGET totals:HINCRBY
--       ends:XADD,XTRIM wake:LLEN,LPUSH,LTRIM watch:DEL,GET,PTTL,SET paused:EXISTS
-- Returns  ms until pending and until unack are due (-1: none, -2: another process watches), how many ids
--          are left in the lists, then id, retries left, deaths in a row for each claimed
-- Nothing to do: no ids. A repeated number gets those of its ids that still carry its nonce, with a new deadline.
--
-- `first` is the list to begin with. At most `direct` messages are taken that must not wait in a buffer: suspects,
-- and those with no retry left. Suspects are narrowed: of the `slots` of a process half run one that was in one death,
-- a quarter those of two; then, and on its last delivery, one runs with no other suspect beside it. `suspects` are held
-- there already, and `narrowest` is the least room of one of them. The others go to the far end of their list.

limit, direct = tonumber(limit), tonumber(direct)
slots, suspects, narrowest = tonumber(slots), tonumber(suspects), tonumber(narrowest)
local lists = first == 'retry' and { retry, ready } or { ready, retry }
local taken, claimed, dropped, moved, dues, calm, doubtful = {}, {}, {}, {}, {}, {}, {}
local met, size, back = {}, {}, {}

local function keep(id, left, died)
  claimed[#claimed + 1] = id
  taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = id, left, died
end

local function held_word(died) return died > 0 and string.format('%.0f~', died) .. nonce or nonce end

local function move(id, due, doubt)
  moved[#moved + 1], dues[#dues + 1] = id, tonumber(due)
  local where = doubt == '?' and doubtful or calm
  where[#where + 1] = id
end

-- Whether a message that died so often may run beside the suspects there are.
local function may_run(died, left)
  if died == 0 then return true end
  local room = (died > 2 or left == 0) and 1 or math.max(1, math.floor(slots / 2 ^ died))
  if suspects + 1 > math.min(room, narrowest) then return false end
  suspects, narrowest = suspects + 1, math.min(room, narrowest)
  return true
end

-- Say of the oldest ids of a list what becomes of each.
local function sort(list)
  local ids = limit > #claimed and redis.call('LRANGE', list, #claimed - limit, -1) or {}
  if #ids == 0 then return end
  local words, lefts = redis.call('HMGET', lease, unpack(ids)), redis.call('HMGET', counts, unpack(ids))
  met[#met + 1], size[list], back[list] = list, #ids, {}
  for i = #ids, 1, -1 do
    local id, word, left = ids[i], words[i], count(lefts[i])
    local due, doubt = (word or ''):match('^@(%d+)(%??)$')
    local died = deaths(word or '')
    local is_direct = died > 0 or left == 0
    if cancelled(word) then
      dropped[#dropped + 1] = id
    elseif due then
      move(id, due, doubt)
    elseif (is_direct and direct == 0) or not may_run(died, left) then
      table.insert(back[list], id)
    else
      if is_direct then direct = direct - 1 end
      keep(id, left, died)
    end
  end
end

local again, known
if limit > 0 then again, known = recall() end
if again == 'stale' then return { -2, -2, 0 } end
if again then
  local before = again ~= '' and cmsgpack.unpack(again) or {}
  for i = 1, #before, 3 do
    local id, died = before[i], before[i + 2]
    if redis.call('HGET', lease, id) == held_word(died) and redis.call('ZSCORE', unack, id) then
      keep(id, count(redis.call('HGET', counts, id)), died)
    end
  end
elseif redis.call('EXISTS', paused) == 0 then
  for _, list in ipairs(lists) do sort(list) end
end

-- The first write is a removal of nothing, as with `begin`.
for _, list in ipairs(met) do redis.call('LTRIM', list, 0, -1) end
if known then redis.call('DEL', lane) end
if #claimed > 0 then
  local deadlines, leases, deadline = {}, {}, score(now_up + lease_ms)
  for i, id in ipairs(claimed) do
    deadlines[2 * i - 1], deadlines[2 * i] = deadline, id
    leases[2 * i - 1], leases[2 * i] = id, held_word(taken[3 * i])
  end
  redis.call('ZADD', unack, unpack(deadlines))
  redis.call('HSET', lease, unpack(leases))
end
-- A claim of nothing leaves no lane behind.
if #claimed > 0 or known then remember(#claimed > 0 and cmsgpack.pack(taken) or '', lease_ms) end
put(pending, dues, moved)
for _, list in ipairs(met) do
  if #back[list] > 0 then redis.call('LPUSH', list, unpack(back[list])) end
  redis.call('LTRIM', list, 0, -size[list] - 1)
end
if #calm > 0 then redis.call('HDEL', lease, unpack(calm)) end
for _, id in ipairs(doubtful) do redis.call('HSET', lease, id, 'suspect') end
finish('cancelled', dropped)

local waits = { -2, -2 }
local holder = watcher ~= '' and redis.call('GET', watch)
local left = holder and holder ~= watcher and redis.call('PTTL', watch) or 0
-- A watch that would last for longer than its two seconds, or for ever, is nobody's.
if watcher ~= '' and (not holder or holder == watcher or left < 0 or left > 2000) then
  redis.call('DEL', watch)
  redis.call('SET', watch, watcher, 'PX', 2000)
  waits = { wait_for(pending), wait_for(unack) }
end
local behind = redis.call('LLEN', ready) + redis.call('LLEN', retry)
if behind > 0 and #claimed + #dropped + #moved > 0 then push_token() end
-- Many tokens, of whomever, would wake somebody for nothing as often.
if #claimed == 0 and redis.call('LLEN', wake) > 1 then redis.call('LTRIM', wake, 0, 0) end
if not again then add('claimed', #claimed) end
return { waits[1], waits[2], behind, unpack(taken) }
