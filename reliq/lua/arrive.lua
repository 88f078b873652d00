-- arrive: a departure of another shard -> pending, ready, retry, unack or dead
--
-- KEYS  pending ready retry unack retries_left lease errors garbage dead totals wake watch windows arrived | msg
-- ARGV  clock from number | id record
-- Runs  pending:ZADD,ZRANGE ready:LPUSH retry:LPUSH unack:ZADD,ZRANGE retries_left:HEXISTS,HSET lease:HDEL,HSET
--       errors:HSET garbage:SISMEMBER dead:XADD totals:HINCRBY wake:LLEN,LPUSH watch:DEL windows:HSET
--       arrived:HGET,HSET msg:SET
-- Returns  `arrived` or `alive` for each; `late` for each of a departure that was over before
-- Nothing to do: a departure that comes again gets its first answer.
--
-- `from` is the shard that they leave. One that is `alive` here stays there: a message of its id is here.

local last, told = (redis.call('HGET', arrived, from) or ''):match('^(%d+) (%a*)$')
local is_late, answers, code = last and tonumber(last) > tonumber(number), {}, ''
if last == number or is_late then
  for i = 1, ITEMS do
    local one = told:sub(i, i)
    answers[i] = is_late and 'late' or one == 'x' and 'alive' or 'arrived'
  end
  return answers
end

local fresh, lefts, words, notes, spans = {}, {}, {}, {}, {}
local places, dues, seen = { pending = {}, ready = {}, retry = {}, unack = {} }, { pending = {}, unack = {} }, {}
for i = 1, ITEMS do
  local id, one = arg(i, ID), cmsgpack.unpack(arg(i, RECORD))
  local state, is_letter = one[1], one[1] == 'dead'
  local taken = not is_letter and (seen[id] or redis.call('HEXISTS', retries_left, id) == 1 or redis.call('SISMEMBER', garbage, id) == 1)
  answers[i], code = taken and 'alive' or 'arrived', code .. (taken and 'x' or 'a')
  if is_letter then
    redis.call('XADD', dead, '*', unpack(one[2]))
  elseif not taken then
    local at, ids, left = dues[state], places[state], tonumber(one[7]) and math.max(1, one[7] - now_down)
    seen[id], fresh[#fresh + 1], ids[#ids + 1] = true, id, id
    if at then at[#at + 1] = ms_of(one[2]) end
    pair(lefts, id, one[4])
    if one[3] ~= '' then pair(words, id, one[3]) end
    if one[5] ~= '' then pair(notes, id, one[5]) end
    if one[6] ~= '' then pair(spans, id, one[6]) end
    redis.call('SET', body(i), one[8], unpack(left and { 'PX', string.format('%.0f', left) } or {}))
  end
end

run('HDEL', lease, fresh)
run('HSET', lease, words)
run('HSET', errors, notes)
if #spans > 0 then redis.pcall('HSET', windows, unpack(spans)) end
for state, ids in pairs(places) do
  if dues[state] then put(state == 'unack' and unack or pending, dues[state], ids)
  elseif run('LPUSH', state == 'ready' and ready or retry, ids) then push_token() end
end
-- When it is cut off before, it is made again in full; after, nobody is asked to have it again.
redis.call('HSET', arrived, from, number .. ' ' .. code)
run('HSET', retries_left, lefts)
add('arrived', #fresh)
return answers
