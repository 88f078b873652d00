-- publish: new -> ready, or pending when it is due later
--
-- KEYS  lane? pending? ready? unack? counts lease? garbage? totals ends wake watch? windows | msg dd
-- ARGV  clock number at delay_ms ttl_ms retries prefix window replace | id value
-- Runs  lane:GET,PEXPIRE,SET pending:ZADD,ZCARD,ZRANGE ready:LLEN,LPUSH unack:ZCARD,ZSCORE counts:HEXISTS,HSET
--       lease:HDEL,HGET,HLEN,HSET garbage:SCARD,SISMEMBER totals:HINCRBY ends:XADD,XTRIM wake:LLEN,LPUSH
--       watch:DEL,STRLEN windows:HSET msg:SET dd:DEL,GET
-- Returns  the due time in ms, then ` INDEX:duplicate` or ` INDEX:tombstoned` for what was not published
-- Nothing to do: a repeated call number gets its first answer, a lower one `stale`.
--
-- `window` is set when the ids were chosen by the caller; only then are there dd keys. `prefix` starts the
-- header, which ends in `value`; it is empty for a bare body. The first write is a SET: at maxmemory it is refused.

local answer = recall()
if answer then
  -- A write: from 7.2 on WAIT looks at what its own connection has written, here nothing yet.
  redis.call('PEXPIRE', lane, 600000)
  return answer
end

local due = tonumber(at) and math.max(tonumber(at), 1e12) or (tonumber(delay_ms) > 0 and now_up + delay_ms or now_down)
local later, chosen = due > now_down, window ~= ''
local expiry = later and string.format('%.0f', math.max(due - now_up, 0) + ttl_ms) or ttl_ms
local due_text = string.format('%.0f', due)
local start = prefix == '' and '' or prefix .. due_text
local reasons, fresh, revived = {}, {}, {}
answer = due_text

if later then
  read('ZCARD', pending)
  read('STRLEN', watch)
else
  read('LLEN', ready)
end

if chosen then
  read('ZCARD', unack)
  read('HLEN', lease)
  read('SCARD', garbage)

  -- Why a chosen id is not published; `revive` when it is cancelled and still in a list.
  local function standing(i, id)
    local ended = replace == '' and read('GET', mark(i))
    if ended and ended ~= 'freed' then return ended == 'ended' and 'duplicate' or 'tombstoned' end
    if read('SISMEMBER', garbage, id) == 1 then return 'duplicate' end
    if read('HEXISTS', counts, id) == 0 then return nil end
    local in_list = read('HGET', lease, id) == '!' and not read('ZSCORE', unack, id)
    return in_list and 'revive' or 'duplicate'
  end

  local seen = {}
  for i = 1, ITEMS do
    local id = arg(i, ID)
    reasons[i] = seen[id] and 'duplicate' or standing(i, id)
    seen[id] = true
  end
end

local left, marks, spans = {}, {}, {}
for i = 1, ITEMS do
  local id, reason = arg(i, ID), reasons[i]
  if not reason or reason == 'revive' then
    redis.call('SET', body(i), start .. arg(i, VALUE), 'PX', expiry)
    local where = reason and revived or fresh
    where[#where + 1] = id
    left[#left + 1], left[#left + 2] = id, retries
    marks[#marks + 1] = chosen and mark(i)
    spans[#spans + 1], spans[#spans + 2] = id, window
  else
    answer = answer .. ' ' .. i .. ':' .. reason
  end
end
-- What is left of an earlier life goes before the message has a place, its mark when it has one.
if chosen and #fresh > 0 then redis.call('HDEL', lease, unpack(fresh)) end
if later then
  put(pending, due, fresh)
  for _, id in ipairs(revived) do redis.call('HSET', lease, id, '@' .. due_text) end
else
  if #fresh > 0 then
    redis.call('LPUSH', ready, unpack(fresh))
    push_token()
  end
  if #revived > 0 then redis.call('HDEL', lease, unpack(revived)) end
end
if #left > 0 then redis.call('HSET', counts, unpack(left)) end
if chosen and #marks > 0 then
  redis.pcall('HSET', windows, unpack(spans))
  redis.call('DEL', unpack(marks))
end
remember(answer, 600000)
add('published', #fresh + #revived)
add('cancelled', #revived)
if #revived > 0 then note_ends(ends, 1000, 'cancelled', revived, {}) end
return answer
