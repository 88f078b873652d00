-- arrive: during a resize, add messages or dead letters that move to this shard from another shard
--
-- KEYS  pending ready retry unack retries_left lease errors garbage dead totals wake watch windows arrived | msg
-- ARGV  clock from number | id record
-- Runs  pending:ZADD,ZRANGE ready:LPUSH retry:LPUSH unack:ZADD,ZRANGE retries_left:HEXISTS,HSET lease:HDEL,HSET
--       errors:HSET garbage:SISMEMBER dead:XADD totals:HINCRBY wake:LLEN,LPUSH watch:DEL windows:HSET
--       arrived:HGET,HSET msg:SET
-- Returns  `arrived` for each added message; `alive` for a message that is not added, because this shard has a living
--          message with its id; `late` for all messages if a later batch from the same shard has arrived.
-- Nothing to do: if the batch has arrived before, returns the reply of its first call.
--
-- `from` is the number of the shard from which the messages move, `number` is the number of the batch in that shard,
-- and `record` has all data of a message.

local last, told = (redis.call('HGET', arrived, from) or ''):match('^(%d+) (%a*)$')
local is_late, answers, code = last and tonumber(last) > tonumber(number), {}, ''
if last == number or is_late then
  for i = 1, ITEMS do answers[i] = is_late and 'late' or told:sub(i, i) == 'x' and 'alive' or 'arrived' end
  return answers
end

local fresh, lefts, words, notes, spans, seen = {}, {}, {}, {}, {}, {}
local places, dues = { pending = {}, ready = {}, retry = {}, unack = {} }, { pending = {}, unack = {} }
for i = 1, ITEMS do
  local id, record = arg(i, ID), cmsgpack.unpack(arg(i, RECORD))
  local state, at, word, left, note, window, expiry, value = unpack(record)
  local is_letter = state == 'dead'
  local is_alive = seen[id] or redis.call('HEXISTS', retries_left, id) == 1 or redis.call('SISMEMBER', garbage, id) == 1
  local is_refused = is_alive and not is_letter
  answers[i], code = is_refused and 'alive' or 'arrived', code .. (is_refused and 'x' or 'a')
  if is_letter then
    redis.call('XADD', dead, '*', unpack(at))
  elseif not is_alive then
    seen[id], fresh[#fresh + 1] = true, id
    table.insert(places[state], id)
    if dues[state] then table.insert(dues[state], ms_of(at)) end
    pair(lefts, id, left)
    if word ~= '' then pair(words, id, word) end
    if note ~= '' then pair(notes, id, note) end
    if window ~= '' then pair(spans, id, window) end
    local ms = tonumber(expiry) and string.format('%.0f', math.max(1, expiry - now_down))
    redis.call('SET', body(i), value, unpack(ms and { 'PX', ms } or {}))
  end
end

run('HDEL', lease, fresh)
run('HSET', lease, words)
run('HSET', errors, notes)
if #spans > 0 then redis.pcall('HSET', windows, unpack(spans)) end
put(pending, dues.pending, places.pending)
put(unack, dues.unack, places.unack)
line_up(places.ready)
redeliver(places.retry)
-- Store the reply, to return it to a repeated call. If Redis stops before this write, a repeated call adds the messages
-- again, because this script sets their retry counts only after this write.
redis.call('HSET', arrived, from, number .. ' ' .. code)
run('HSET', retries_left, lefts)
add('arrived', #fresh)
return answers
