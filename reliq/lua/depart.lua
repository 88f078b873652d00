-- depart: during a resize, reserve a batch of messages or dead letters that moves to other shards
--
-- KEYS  pending ready retry unack retries_left lease errors garbage dead totals ends windows leaving | msg
-- ARGV  clock state | id
-- Runs  pending:ZREM,ZSCORE ready:LRANGE,LTRIM retry:LRANGE,LTRIM unack:ZADD,ZREM,ZSCORE retries_left:HDEL,HGET
--       lease:HDEL,HGET,HSET errors:HDEL,HGET,HMGET garbage:SADD dead:XDEL,XRANGE totals:HINCRBY ends:XADD
--       windows:HGET leaving:HGETALL,HSET msg:GET,PTTL
-- Returns  first an empty text, and the number of the batch with its state; then the name and all data of each message
--          or dead letter. The name of a message is its id. The name of a dead letter is its letter id, a space, and
--          its message id.
-- Nothing to do: until `leave` has finished the move of a batch, every call returns this batch again.
--
-- Until `leave` removes them, the messages of a batch are in `unack` with a deadline in the distant future, but no
-- worker has their leases. From `ready` or `retry`, only the oldest messages can move, so the ids must be in the order
-- of the list. If `state` is `dead`, the ids are ids of dead letters. A message without a body moves to `garbage` and
-- will end as expired. A cancelled message ends immediately. A batch has at most 8 MiB of bodies, and the message that
-- exceeds them.

local under_way = redis.call('HGETALL', leaving)
if #under_way > 2 then return under_way end

local last = tonumber((under_way[2] or ''):match('^%d+')) or 0
local number, span = string.format('%.0f', math.max(last + 1, us)), 9000000000000
local word, far = 'shards.' .. number .. string.format(':%.0f', span), score(now_up + span)
local list = ({ ready = ready, retry = retry })[state]
local oldest = list and ITEMS > 0 and redis.call('LRANGE', list, -ITEMS, -1) or {}
local all, words, deadlines, gone, empty, dropped, marks = { '', number .. ' ' .. state }, {}, {}, {}, {}, {}, {}
local met, bytes = 0, 0

local function place_of(id, known)
  if list then return oldest[#oldest - met] == id and '' end
  if state == 'unack' then return waits(known) and redis.call('ZSCORE', unack, id) end
  return redis.call('ZSCORE', pending, id)
end

local function letter(name)
  local found = redis.call('XRANGE', dead, name, name)[1]
  if not found then return end
  local fields = fields_of(found)
  if not fields.died then pair(found[2], 'died', name) end
  pair(all, name .. ' ' .. (fields.id or ''), cmsgpack.pack({ state, found[2] }))
  bytes, gone[#gone + 1] = bytes + #all[#all], name
end

local function message(i, id)
  local known = redis.call('HGET', lease, id) or ''
  local at, value = place_of(id, known), redis.pcall('GET', body(i))
  if not at then return end
  met = met + 1
  if cancelled(known) then dropped[#dropped + 1], marks[id] = id, known return end
  if type(value) ~= 'string' then empty[#empty + 1] = id return end
  local left, ttl = redis.call('HGET', retries_left, id) or '', redis.call('PTTL', body(i))
  local expiry = ttl < 0 and '' or string.format('%.0f', now_up + ttl)
  local note, window = redis.call('HGET', errors, id) or '', redis.pcall('HGET', windows, id)
  pair(all, id, cmsgpack.pack({ state, at, known, left, note, type(window) == 'string' and window or '', expiry, value }))
  pair(words, id, word)
  pair(deadlines, far, id)
  bytes, gone[#gone + 1] = bytes + #value, id
end

for i = 1, ITEMS do
  if bytes > 8388608 then break end
  if state == 'dead' then letter(arg(i, ID)) else message(i, arg(i, ID)) end
end

redis.call('HSET', leaving, unpack(all))
run('HSET', lease, words)
run('ZADD', unack, deadlines)
run('SADD', garbage, empty)
if state == 'dead' then run('XDEL', dead, gone) end
if list then redis.call('LTRIM', list, 0, -met - 1) end
for _, ids in ipairs({ state == 'pending' and gone or {}, empty, dropped }) do run('ZREM', pending, ids) end
run('ZREM', unack, empty)
run('ZREM', unack, dropped)
run('HDEL', retries_left, empty)
run('HDEL', lease, empty)
by_end(dropped, marks, finish)
return all
