-- cancel: pending -> gone, a nacked one -> gone; in a list or in a worker it is marked and ends where it is met
--
-- KEYS  pending ready retry unack counts lease errors totals ends windows | msg dd
-- ARGV  clock bare tombstone_ms | id
-- Runs  pending:ZREM,ZSCORE ready:LPOS,LREM retry:LPOS,LREM unack:ZREM,ZSCORE counts:HDEL,HEXISTS
--       lease:HDEL,HGET,HSET errors:HDEL,HMGET totals:HINCRBY ends:XADD,XTRIM windows:HDEL msg:DEL dd:GET,PTTL,SET
-- Returns  `cancelled`, `running` or `not_found` for each id
-- Nothing to do: `not_found`, and where a tombstone is asked for one that a publish still on its way will meet.
--
-- With `tombstone_ms` the ids are taken for so long; without, they are free at once, and `freed` is what a repeated
-- cancel is told by. Of bare bodies an id leaves its list, as far as it is found among 100,000 from either end: one
-- without a body would hold a place of a Go consumer for good.

local answers, gone, words, marks, bodies, seen, listed = {}, {}, {}, {}, {}, {}, {}

-- Find an id of a bare body in a list, from either end.
local function is_in(list, id)
  local reach = math.ceil(100000 / ITEMS)
  local last = bare ~= '' and redis.call('LPOS', list, id, 'RANK', -1, 'MAXLEN', reach)
  local first = bare ~= '' and not last and redis.call('LPOS', list, id, 'MAXLEN', reach)
  if last or first then listed[#listed + 1] = { list, last and -1 or 1, id } end
  return last or first
end

for i = 1, ITEMS do
  local id, dd = arg(i, ID), mark(i)
  local word, held = redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local before = redis.pcall('GET', dd)
  answers[i] = seen[id] or 'cancelled'
  bodies[#bodies + 1] = body(i)
  if seen[id] then
    bodies[#bodies] = nil
  elseif redis.call('ZSCORE', pending, id) or (held and waits(word)) then
    gone[#gone + 1] = id
  elseif held then
    answers[i] = 'running'
    if not cancelled(word) then words[#words + 1], words[#words + 2] = id, (word or '') .. '!' end
  elseif redis.call('HEXISTS', counts, id) == 1 and (is_in(ready, id) or is_in(retry, id)) then
    gone[#gone + 1] = id
  elseif redis.call('HEXISTS', counts, id) == 1 then
    words[#words + 1], words[#words + 2] = id, '!'
  else
    local was_cancelled = before == 'cancelled' or before == 'freed'
    bodies[#bodies], answers[i] = nil, was_cancelled and 'cancelled' or 'not_found'
  end
  seen[id] = answers[i]
  local mark_of = answers[i] == 'not_found' and 'unknown' or 'cancelled'
  -- A marker that lasts longer stays: the id is taken until then.
  if tombstone_ms ~= '' then
    local is_longer = redis.call('PTTL', dd) < tonumber(tombstone_ms)
    if is_longer or (mark_of == 'cancelled' and before ~= mark_of) then marks[#marks + 1] = { dd, mark_of } end
  elseif bodies[#bodies] == body(i) and answers[i] == 'cancelled' and before ~= 'cancelled' and before ~= 'unknown' then
    marks[#marks + 1] = { dd, 'freed' }
  end
end

begin(pending)
for _, one in ipairs(marks) do redis.call('SET', one[1], one[2], 'PX', tombstone_ms ~= '' and tombstone_ms or 60000) end
if #words > 0 then redis.call('HSET', lease, unpack(words)) end
if #gone > 0 then
  redis.call('ZREM', pending, unpack(gone))
  redis.call('ZREM', unack, unpack(gone))
  for _, one in ipairs(listed) do redis.call('LREM', one[1], one[2], one[3]) end
end
finish('cancelled', gone)
if #gone > 0 then redis.pcall('HDEL', windows, unpack(gone)) end
if #bodies > 0 then redis.call('DEL', unpack(bodies)) end
return answers
