-- publish: new -> ready, or pending if it is due later
--
-- KEYS  lane? pending? ready? unack? retries_left lease? garbage? totals ends wake watch windows epoch | msg dedup
-- ARGV  clock number at delay_ms ttl_ms retries prefix window replace remember_ms known keyed | id value key
-- Runs  lane:GET,PEXPIRE,SET pending:ZADD,ZCARD,ZRANGE ready:LLEN,LPUSH unack:ZSCORE retries_left:HEXISTS,HSET
--       lease:HDEL,HGET,HLEN,HSET garbage:SISMEMBER totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL windows:HSET
--       epoch:GET,SET msg:SET dedup:DEL,GET
-- Keyed  limits:HGET,HMGET,HSETNX ring:ZADD,ZRANGE,ZREM held:ZCARD,ZLEXCOUNT asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS,LPOS,LREM retries_left:HGET line:EXISTS,LPOS,LPUSH,LREM map:GET
-- Returns  the due time in ms, then ` INDEX:duplicate` or ` INDEX:tombstoned` for each message that was not published;
--          `epoch` and the fence if the fence refused the call
-- Nothing to do: a repeated call number gets its first answer, a lower number `stale`.
--
-- `window` is set if the ids were chosen by the caller; only then are there dedup keys. `prefix` is the start of the
-- header, whose end is in `value`; empty for a bare body. The first write is a SET, which Redis refuses at maxmemory.
-- `known` is the fence of the publisher's map; empty for generated ids in shard 0, which are valid with any map.
-- `keyed` is 1 if a message has a key; then every message has a key argument, maybe empty. The queue must have one
-- shard.

local answer = recall()
if answer then
  -- This write is needed because from 7.2 on WAIT covers only the writes of its own connection.
  redis.call('PEXPIRE', lane, remember_ms)
  return answer
end

local refused, is_new = fence(window ~= '')
-- keyed: if keyed == '1' and is_sharded() then refused = 'epoch ' end
-- The refusal is stored too: an earlier try of the same call may still be on its way.
if refused then remember(refused, remember_ms) return refused end

local due = tonumber(at) and math.max(tonumber(at), 1e12) or (tonumber(delay_ms) > 0 and now_up + delay_ms or now_down)
local later, chosen, due_text = due > now_down, window ~= '', string.format('%.0f', due)
local expiry = string.format('%.0f', math.max(due - now_up, 0) + ttl_ms)
local start = prefix == '' and '' or prefix .. due_text
local reasons, fresh, revived, left, marks, spans = {}, {}, {}, {}, {}, {}
read(later and 'ZCARD' or 'LLEN', later and pending or ready)

-- keyed: local old = {}
if chosen then
  read('HLEN', lease)
  local seen = {}
  for i = 1, ITEMS do
    local id = arg(i, ID)
    reasons[i], seen[id] = seen[id] and 'duplicate' or standing(i, id), true
    -- keyed: if reasons[i] == 'revive' then old[id] = old_place(id) end
  end
end

if is_new then redis.call('SET', epoch, known) end
answer = due_text
for i = 1, ITEMS do
  local id, reason = arg(i, ID), reasons[i]
  if reason and reason ~= 'revive' then
    answer = answer .. ' ' .. i .. ':' .. reason
  else
    redis.call('SET', body(i), start .. arg(i, VALUE), 'PX', expiry)
    local where = reason and revived or fresh
    -- keyed: if reason and old[id] then where = fresh end
    where[#where + 1] = id
    pair(left, id, retries)
    -- keyed: local key = key_arg(i)
    -- keyed: key_of[id], left[#left] = key, counted(retries, key)
    if chosen then pair(spans, id, window) marks[#marks + 1] = mark(i) end
  end
end
-- keyed: redis.call('HSETNX', limits, 'on', '1')
-- Remove the old state word before the message has a place, and the old message's mark afterwards.
if chosen then run('HDEL', lease, fresh) end
enter(fresh, due)
for _, id in ipairs(later and revived or {}) do redis.call('HSET', lease, id, '@' .. due_text) end
if not later then run('HDEL', lease, revived) end
run('HSET', retries_left, left)
-- keyed: leave_old(old, revived)
if #marks > 0 then
  redis.pcall('HSET', windows, unpack(spans))
  redis.call('DEL', unpack(marks))
end
remember(answer, remember_ms)
add('published', #left / 2)
add('cancelled', #revived)
if #revived > 0 then note_ends(ends, 1000, 'cancelled', revived, {}, {}) end
return answer
