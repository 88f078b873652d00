-- publish: add messages to ready, or to pending if they are due later
--
-- KEYS  lane? pending? ready? unack? retries_left lease? garbage? totals ends wake watch windows epoch | msg dedup
-- ARGV  clock number at delay_ms ttl_ms retries prefix window replace remember_ms known keyed | id value key
-- Runs  lane:GET,PEXPIRE,SET pending:ZADD,ZCARD,ZRANGE ready:LLEN,LPUSH unack:ZSCORE retries_left:HEXISTS,HSET
--       lease:HDEL,HGET,HLEN,HSET garbage:SISMEMBER totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL windows:HSET
--       epoch:GET,SET msg:SET dedup:DEL,GET
-- Keyed  limits:HGET,HMGET,HSETNX ring:ZADD,ZRANGE,ZREM held:ZCARD,ZLEXCOUNT asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS,LPOS,LREM retries_left:HGET line:EXISTS,LPOS,LPUSH,LREM map:GET
-- Returns  the due time in unix ms, then ` INDEX:duplicate` or ` INDEX:tombstoned` for each message that was not
--          published. If the shard refuses the publisher's shard map: `epoch` and the version of the shard's own map.
-- Nothing to do: for the call number of an earlier call, returns the reply of that call; for a lower call number,
--          returns `stale`.
--
-- For chosen ids, `window` is for how many ms an id stays blocked after the end of its message, and the script call has
-- deduplication keys. For generated ids, `window` is empty. `known` is the version of the publisher's shard map. It is
-- empty for generated ids in shard 0, because shard 0 may publish them with any shard map.
--
-- The script stores each message as `prefix` (the start of the header), the due time, and `value` (the rest of the
-- header, and the body). For a bare body, `prefix` is empty. The first write is a SET, so if Redis is full
-- (`maxmemory`), it refuses the whole call.
--
-- `keyed` is 1 if any message of the call has a message key. Each message then has the argument `key`, which is empty
-- for a message without a key. A queue with several shards refuses such a call.

local answer = recall()
if answer then
  -- A repeated script call must write too. After it, the client may run WAIT, and since Redis 7.2, WAIT confirms only
  -- the writes of the same connection.
  redis.call('PEXPIRE', lane, remember_ms)
  return answer
end

local refused, is_new = fence(window ~= '')
-- keyed: if keyed == '1' and is_sharded() then refused = 'epoch ' end
-- Store this reply too. If the client repeats a call, its first call may arrive later and must get the same reply.
if refused then remember(refused, remember_ms) return refused end

local due = tonumber(at) and math.max(tonumber(at), 1e12) or (tonumber(delay_ms) > 0 and now_up + delay_ms or now_down)
local later, chosen, due_text = due > now_down, window ~= '', string.format('%.0f', due)
local expiry = string.format('%.0f', math.max(due - now_up, 0) + ttl_ms)
local start = prefix == '' and '' or prefix .. due_text
local reasons, fresh, revived, words, left, marks, spans = {}, {}, {}, {}, {}, {}, {}
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
    if reason then words[id] = redis.call('HGET', lease, id) end
    pair(left, id, retries)
    -- keyed: local its_line = line_arg(i)
    -- keyed: left[#left], key_of[id] = counted(retries, its_line), key_of_line(its_line)
    if chosen then pair(spans, id, window) marks[#marks + 1] = mark(i) end
  end
end
-- keyed: redis.call('HSETNX', limits, 'on', '1')
-- An earlier message may have had the same id. Delete its state word before the new message is added to a list, and
-- delete its deduplication key afterwards.
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
by_end(revived, words, count_ends)
return answer
