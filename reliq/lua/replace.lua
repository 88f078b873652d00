-- replace: publish messages with chosen ids, even if waiting or running messages already have these ids
--
-- KEYS  lane? pending ready unack retries_left lease garbage totals ends wake watch windows epoch | msg dedup
-- ARGV  clock number at delay_ms ttl_ms retries prefix mode span_ms most_ms remember_ms known keyed | id value key
-- Runs  lane:GET,PEXPIRE,SET pending:ZADD,ZRANGE,ZSCORE ready:LPUSH unack:ZADD,ZRANGE,ZSCORE retries_left:HGET,HSET
--       lease:HDEL,HGET,HSET garbage:SISMEMBER totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL windows:HDEL
--       epoch:GET,SET msg:SET dedup:DEL,GET,PTTL,SET
-- Keyed  limits:HGET,HMGET,HSETNX ring:EXISTS,ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       ready:EXISTS retry:EXISTS line:EXISTS,LPUSH map:GET
-- Returns  a due time in ms, then for each accepted message ` INDEX:published:MS`, ` INDEX:replaced:MS` or `
--          INDEX:follows:MS` with its due time; for any other message ` INDEX:duplicate`, ` INDEX:tombstoned`, or `
--          INDEX:ending` if a message with its id is about to become a dead letter. If the shard refuses the
--          publisher's shard map: `epoch` and the version of the shard's own map.
-- Nothing to do: for the call number of an earlier call, returns the reply of that call; for a lower call number,
--          returns `stale`.
--
-- If a message with the same id waits, it gets the body, retries and due time of the new message. If a message with the
-- same id runs, the new message becomes its successor: it is published under this id when the running message ends.
--
-- `mode` is `follow`, `replace`, `debounce` or `throttle`. With `follow`, a waiting message is not replaced. With
-- `debounce`, a message starts `span_ms` after the last publish of its id, but at most `most_ms` after the first
-- publish. With `throttle`, messages with the same id start at least `span_ms` apart. The TTL of the deduplication key
-- then stores when the next message may start.

local answer = recall()
if answer then
  redis.call('PEXPIRE', lane, remember_ms)
  return answer
end
local refused, is_new = fence(true)
-- keyed: if keyed == '1' and is_sharded() then refused = 'epoch ' end
if refused then remember(refused, remember_ms) return refused end

local asked = tonumber(at) and math.max(tonumber(at), 1e12) or (tonumber(delay_ms) > 0 and now_up + delay_ms or now_down)
local rows, seen = {}, {}
for i = 1, ITEMS do
  local id, before = arg(i, ID), read('GET', mark(i))
  local row = { word = redis.call('HGET', lease, id) or '', left = redis.call('HGET', retries_left, id), due = asked }
  local leased, planned = redis.call('ZSCORE', unack, id), redis.call('ZSCORE', pending, id)
  if seen[id] then row.is = 'duplicate'
  elseif before == 'cancelled' or before == 'unknown' then row.is = 'tombstoned'
  elseif redis.call('SISMEMBER', garbage, id) == 1 then row.is = 'ending'
  elseif not row.left then row.is = 'new'
  elseif planned then row.is = 'pending'
  elseif leased then row.is = waits(row.word) and 'backoff' or call_of(row.word) and 'running' or 'duplicate'
  else row.is = cancelled(row.word) and 'revived' or 'listed' end
  local has_heir = heir(row.word)
  local is_waiting = row.is == 'pending' or row.is == 'listed' or row.is == 'backoff' or has_heir
  if mode == 'follow' and is_waiting then row.is = 'duplicate' end
  if mode == 'throttle' and before == 'ended' then
    row.due = math.max(asked, now_down + redis.call('PTTL', mark(i)) - (is_waiting and span_ms or 0))
  elseif mode == 'debounce' then
    row.since = tonumber(row.word:match('>(%d+)')) or now_down
    row.due = math.min(now_up + span_ms, row.since + most_ms, row.is == 'backoff' and ms_of(leased) or math.huge)
  end
  rows[i], seen[id] = row, true
end

if is_new then redis.call('SET', epoch, known) end
-- keyed: redis.call('HSETNX', limits, 'on', '1')
answer = string.format('%.0f', asked)
local published, replaced, revived, words = 0, 0, {}, {}
for i, row in ipairs(rows) do
  local id, is, due, due_text = arg(i, ID), row.is, row.due, string.format('%.0f', row.due)
  if is == 'duplicate' or is == 'tombstoned' or is == 'ending' then
    answer = answer .. ' ' .. i .. ':' .. is
  else
    local later, first = due > now_down, row.since and string.format('>%.0f', row.since) or ''
    local start = prefix == '' and '' or prefix .. due_text
    redis.call('SET', body(i), start .. arg(i, VALUE), 'PX', string.format('%.0f', math.max(due - now_up, 0) + ttl_ms))
    -- If the replaced message waits for the end of its backoff, add a retry, because `reclaim` will subtract a retry.
    local left = is == 'backoff' and string.format('%.0f', retries + 1) or retries
    local key = ''
    -- keyed: left = counted(left, line_arg(i))
    -- keyed: key = key_in(left)
    if is == 'running' then
      local own = row.word:match('^[^+!]*') .. '+' .. due_text .. '.' .. retries .. first
      redis.call('HSET', lease, id, own .. (cancelled(row.word) and '!' or ''))
    elseif is == 'backoff' then
      put(unack, due, { id })
      redis.call('HSET', retries_left, id, left)
    elseif is == 'listed' or is == 'revived' then
      -- If the message is in a list, do not remove it from the list. If it is now due later, set its state word `@MS`,
      -- by which the next claim moves it to `pending`.
      if later and (mode ~= 'debounce' or is == 'revived') then
        redis.call('HSET', lease, id, '@' .. due_text)
      elseif is == 'revived' or mode ~= 'debounce' and row.word:find('^@') then
        redis.call('HDEL', lease, id)
      end
      redis.call('HSET', retries_left, id, left)
    else
      if first ~= '' then redis.call('HSET', lease, id, first) else redis.call('HDEL', lease, id) end
      -- keyed: key_of[id] = key
      if is == 'pending' then put(pending, due, { id }) else enter({ id }, due) end
      redis.call('HSET', retries_left, id, left)
    end
    -- keyed: key_of[id] = key_in(row.left)
    -- keyed: if (is == 'pending' or is == 'backoff') and key_of[id] ~= key then free_places({ id }) end
    if mode == 'throttle' and (is == 'new' or is == 'revived' or is == 'running' and not heir(row.word)) then
      redis.call('SET', mark(i), 'ended', 'PX', string.format('%.0f', math.max(0, due - now_down) + span_ms + 1))
    elseif mode ~= 'throttle' then
      redis.call('DEL', mark(i))
    end
    redis.pcall('HDEL', windows, id)
    if is == 'revived' then revived[#revived + 1], words[id] = id, row.word end
    local is_new_one = is == 'new' or is == 'revived'
    if is_new_one then published = published + 1 else replaced = replaced + 1 end
    local status = is_new_one and 'published' or is == 'running' and 'follows' or 'replaced'
    answer = answer .. ' ' .. i .. ':' .. status .. ':' .. due_text
  end
end
remember(answer, remember_ms)
add('published', published)
add('replaced', replaced)
by_end(revived, words, count_ends)
return answer
