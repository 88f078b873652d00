-- cancel: cancel messages, or purge them
--
-- KEYS  pending ready retry unack retries_left lease errors totals ends windows wake limits ring held asleep rates line | msg dedup
-- ARGV  clock bare tombstone_ms kind | id
-- Runs  pending:ZREM,ZSCORE ready:EXISTS,LPOS,LREM retry:EXISTS,LPOS,LREM unack:ZREM,ZSCORE retries_left:HDEL,HGET
--       lease:HDEL,HGET,HSET errors:HDEL,HMGET totals:HINCRBY ends:XADD windows:HDEL msg:DEL dedup:GET,PTTL,SET
--       wake:LLEN,LPUSH limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE
--       rates:ZREM,ZSCORE line:EXISTS
-- Returns  `cancelled`, `running` or `not_found` for each id.
-- Nothing to do: for an unknown id, returns `not_found`. With `tombstone_ms`, the script blocks this id too, because a
--          publish of the id may arrive later.
--
-- Messages in `pending` or in backoff end immediately. For other messages, the script only changes the state word: a
-- message in a list ends when a claim reads its id, and a running message ends when its handler returns. `kind` is
-- `cancelled` or `purged`, and says how waiting messages end. Running messages always end as cancelled.
--
-- With `tombstone_ms`, the ids cannot be published again for this time. Without it, the id of a waiting message can be
-- published immediately. The script then writes `freed` into the deduplication key of this id, so that a repeated
-- cancel also returns `cancelled`.
--
-- In a queue with bare bodies, consumers in Go may claim messages, and an id without a body would block a slot of such
-- a consumer forever. So the script also removes an id from its list, if the id is near an end of the list.

local answers, gone, words, marks, bodies, listed = {}, {}, {}, {}, {}, {}

-- In a queue with bare bodies, return whether an id is near an end of a list. If it is, add it to `listed`: the script
-- removes these ids from their lists at the end.
local function is_in(list, id)
  local reach = math.ceil(100000 / ITEMS)
  local last = bare ~= '' and redis.call('LPOS', list, id, 'RANK', -1, 'MAXLEN', reach)
  local first = bare ~= '' and not last and redis.call('LPOS', list, id, 'MAXLEN', reach)
  if last or first then listed[#listed + 1] = { list, last and -1 or 1, id } end
  return last or first
end

for i = 1, ITEMS do
  local id, before = arg(i, ID), redis.pcall('GET', mark(i))
  local word, leased = redis.call('HGET', lease, id), redis.call('ZSCORE', unack, id)
  local planned, left = redis.call('ZSCORE', pending, id), redis.call('HGET', retries_left, id)
  local found, runs = planned or leased or left, leased and not planned and not waits(word)
  local is_ended = found or before == 'cancelled' or before == 'freed'
  answers[i] = runs and 'running' or is_ended and 'cancelled' or 'not_found'
  key_of[id] = key_in(left)
  if found then
    bodies[#bodies + 1] = body(i)
    if planned or (leased and not runs) or (not leased and (is_in(ready, id) or is_in(retry, id))) then
      gone[#gone + 1] = id
    elseif heir(word) then
      -- Cancel the running message, and drop its successor, which would be published under the same id.
      pair(words, id, word:match('^[^+]*') .. '!')
    elseif not cancelled(word) then
      pair(words, id, runs and (word or '') .. '!' or kind == 'purged' and 'purged!' or '!')
    end
  end
  local mark_of = answers[i] == 'not_found' and 'unknown' or 'cancelled'
  -- Block the id for `tombstone_ms`, unless its deduplication key already blocks it for longer. But if this call
  -- cancels a message, overwrite a deduplication key that does not have the value `cancelled`.
  if tombstone_ms ~= '' then
    local is_longer = redis.call('PTTL', mark(i)) < tonumber(tombstone_ms)
    if is_longer or (mark_of == 'cancelled' and before ~= mark_of) then pair(marks, mark(i), mark_of) end
  elseif found and answers[i] == 'cancelled' and before ~= 'cancelled' and before ~= 'unknown' then
    pair(marks, mark(i), 'freed')
  end
end

begin(pending)
for j = 1, #marks, 2 do
  redis.call('SET', marks[j], marks[j + 1], 'PX', tombstone_ms ~= '' and tombstone_ms or 60000)
end
run('HSET', lease, words)
run('ZREM', pending, gone)
run('ZREM', unack, gone)
for _, one in ipairs(listed) do redis.call('LREM', unpack(one)) end
finish(kind, gone)
if #gone > 0 then redis.pcall('HDEL', windows, unpack(gone)) end
if #bodies > 0 then redis.call('DEL', unpack(bodies)) end
free_places(gone)
if #words > 0 then price_head() end
return answers
