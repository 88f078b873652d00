-- claim: ready -> unack, retry -> unack
--
-- KEYS  lane ready retry unack pending counts lease errors totals ends wake watch paused
-- ARGV  clock number nonce lease_ms limit first direct suspects watcher
-- Returns  ms until pending and until unack are due (-1: none, -2: another process watches), how many ids
--          are left in the lists, then id, retries left, `suspect` or `` for each claimed
-- Nothing to do: no ids. A repeated number gets those of its ids that still carry its nonce, with a new deadline.
--
-- `first` is the list to begin with. At most `suspects` suspects are taken, and at most `direct` messages that
-- must not wait in a buffer (suspects, and those with no retry left); the others go to the far end of their list.

limit, direct, suspects = tonumber(limit), tonumber(direct), tonumber(suspects)
local taken, claimed, dropped, moved = {}, {}, {}, 0

local function keep(id, left, flag)
  claimed[#claimed + 1] = id
  taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = id, left, flag
end

local function take(list)
  local ids = limit > #claimed and redis.call('LRANGE', list, #claimed - limit, -1) or {}
  if #ids == 0 then return end
  local words, lefts = redis.call('HMGET', lease, unpack(ids)), redis.call('HMGET', counts, unpack(ids))
  local back = {}
  redis.call('LTRIM', list, 0, -#ids - 1)
  for i = #ids, 1, -1 do
    local id, word, left = ids[i], words[i], count(lefts[i])
    local due, doubt = (word or ''):match('^@(%d+)(%??)$')
    local suspect = word == 'suspect'
    local alone = suspect or left == 0
    if cancelled(word) then
      dropped[#dropped + 1] = id
    elseif due then
      redis.call('HDEL', lease, id)
      if doubt == '?' then redis.call('HSET', lease, id, 'suspect') end
      put(pending, tonumber(due), { id })
      moved = moved + 1
    elseif (suspect and suspects == 0) or (alone and direct == 0) then
      back[#back + 1] = id
    else
      if suspect then suspects = suspects - 1 end
      if alone then direct = direct - 1 end
      keep(id, left, suspect and 'suspect' or '')
    end
  end
  if #back > 0 then redis.call('LPUSH', list, unpack(back)) end
end

local again = limit > 0 and recall()
if again == 'stale' then return { -2, -2, 0 } end
if again then
  for id, flag in again:gmatch('([^\n]+)\t([^\n]*)') do
    if redis.call('HGET', lease, id) == nonce and redis.call('ZREM', unack, id) == 1 then
      keep(id, count(redis.call('HGET', counts, id)), flag)
    end
  end
elseif redis.call('EXISTS', paused) == 0 then
  take(first == 'retry' and retry or ready)
  take(first == 'retry' and ready or retry)
end

local deadlines, leases, record = {}, {}, {}
for i, id in ipairs(claimed) do
  deadlines[2 * i - 1], deadlines[2 * i] = score(now_up + lease_ms), id
  leases[2 * i - 1], leases[2 * i] = id, nonce
  record[i] = id .. '\t' .. taken[3 * i]
end
if #claimed > 0 then
  redis.call('ZADD', unack, unpack(deadlines))
  redis.call('HSET', lease, unpack(leases))
end
finish('cancelled', dropped)
if limit > 0 then
  redis.call('DEL', lane)
  remember(table.concat(record, '\n'), lease_ms)
end

local waits = { -2, -2 }
local holder = redis.call('GET', watch)
if watcher ~= '' and (not holder or holder == watcher) then
  redis.call('DEL', watch)
  redis.call('SET', watch, watcher, 'PX', 2000)
  waits = { wait_for(pending), wait_for(unack) }
end
local behind = redis.call('LLEN', ready) + redis.call('LLEN', retry)
if behind > 0 and #claimed + #dropped + moved > 0 then push_token() end
if not again then add('claimed', #claimed) end
return { waits[1], waits[2], behind, unpack(taken) }
