-- Shared by all scripts. A loaded script consists of: locals for KEYS and ARGV from its header, the functions of this
-- file that it uses, a read of every key to check its type, and the script itself. A script reads first, then adds,
-- then removes. So a script that is interrupted may deliver a message twice, but loses none.
-- Values of the i-th message: `arg(i, NAME)` and `body(i)`; `mark(j)` is the j-th dedup key.
--
-- The state word of a message is its field in `lease`. A message without a state word waits, or was leased by a foreign
-- consumer. D is a number of 1 to 99, times are in ms.
--
--   word             where the id is   meaning
--   LANE.NUMBER:MS   unack             leased by that call of that lane; MS is the longest lease it was given
--   D~LANE.NUMBER:MS unack             the same, after D deliveries in a row that ended by an expired lease
--   HELD!            unack             one of the two words above, and cancelled: ends with the delivery
--   !                ready, retry      cancelled: dropped by the next claim; in unack: cancelled without a state word
--   nacked           unack             waits for its redelivery
--   suspect          unack, a list     waits after a delivery that ended by an expired lease
--   suspectD         unack, a list     the same, after D deliveries in a row
--   @MS              ready, retry      the next claim moves it to pending, due at MS; formerly also `@MS?`

-- The current time in ms: rounded up to compute due times and deadlines, rounded down to check whether they have
-- passed, so that nothing happens too early.
local time = clock == '' and redis.call('TIME') or { 0, clock }
local us = time[1] * 1000000 + time[2]
local now_up, now_down = math.ceil(us / 1000), math.floor(us / 1000)

local function arg(i, field) return ARGV[HEAD_ARGS + (i - 1) * TAIL_ARGS + field] end
local function body(i) return KEYS[HEAD_KEYS + i] end
local function all_bodies() return unpack(KEYS, HEAD_KEYS + 1, HEAD_KEYS + ITEMS) end
local function mark(j) return KEYS[#KEYS - ITEMS + j] end

-- Read a key. If it has the wrong type, the script fails with the key's name before it writes anything.
local function read(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  local why = type(answer) == 'table' and answer.err
  if not why then return answer end
  error(why .. (why:find('WRONGTYPE') and ' RELIQ_KEY ' .. key .. ' ' or ' (' .. command .. ' ' .. key .. ')'), 0)
end

-- Run a command on a key with a list of arguments; an empty list runs nothing and returns false.
local function run(command, key, list) return #list > 0 and redis.call(command, key, unpack(list)) end
local function pair(list, one, other)
  local n = #list
  list[n + 1], list[n + 2] = one, other
end

local function score(ms) return string.format('%.3f', ms / 1000) end
local function ms_of(text) return math.floor(text * 1000 + 0.5) end

-- The retries left of a message, stored before its key; an invalid, missing or negative number counts as 0.
local function count(text)
  local left = text and (text:match('^%d+$') or text:match('^(%d+) .'))
  return left and math.min(tonumber(left), 1000000) or 0
end
local function cancelled(word) return word and word:sub(-1) == '!' end

-- How many deliveries in a row the message has not survived, from its state word.
local function deaths(word)
  local waiting = word:match('^suspect(%d*)$')
  return waiting == '' and 1 or math.min(tonumber(waiting or word:match('^(%d+)~') or 0), 99)
end
local function word_of(died) return died > 0 and string.format('%.0f~', died) .. nonce or nonce end
local function suspect(died) return 'suspect' .. (died > 1 and string.format('%.0f', died) or '') end

-- Whether a message with so many deaths may run beside the suspects of its process.
local function may_run(died, left)
  if died == 0 then return true end
  local room = (died > 2 or left == 0) and 1 or math.max(1, math.floor(slots / 2 ^ died))
  if suspects + 1 > math.min(room, narrowest) then return false end
  suspects, narrowest = suspects + 1, math.min(room, narrowest)
  return true
end

-- Whether a message in unack is not leased but waits for its next delivery.
local function waits(word) return word == 'nacked' or (word or ''):find('^suspect') end

-- Totals are written last and never fail: a wrong total is better than a lost message.
local function add(kind, n) return n > 0 and redis.pcall('HINCRBY', totals, kind, n) end

-- A number above those of all earlier claims. It is the time, unless the clock went back or a promoted replica's clock
-- is behind. A key of the wrong type fails here; an invalid number is ignored.
local function new_token()
  local last = tonumber(read('GET', token) or 0)
  local next = last and last >= us and last < 2 ^ 53 and last + 1 or us
  redis.call('SET', token, next)
  return next
end

local function push_token()
  if redis.call('LLEN', wake) == 0 then redis.call('LPUSH', wake, '1') end
end

local function head(zset)
  local first = redis.call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  return first[2] and ms_of(first[2])
end

-- ms until the first id of `zset` is due, at most a day; -1 if it is empty.
local function wait_for(zset)
  local due = head(zset)
  return due and math.max(0, math.min(due - now_down, 86400000)) or -1
end

-- Become the watcher of the next times of pending and unack, unless another process is: ms until each, or -2. A watch
-- that would last longer than two seconds, or has no end, is ignored.
local function watch_for_due()
  local left = watcher ~= '' and redis.call('PTTL', watch)
  if not left or (left >= 0 and left <= 2000 and redis.pcall('GET', watch) ~= watcher) then return -2, -2 end
  redis.call('DEL', watch)
  redis.call('SET', watch, watcher, 'PX', 2000)
  return wait_for(pending), wait_for(unack)
end

-- The first write of a script that removes messages: it removes an id that does not exist. At `maxmemory` Redis checks
-- only the first write of a script, so all others pass. A user without permission to remove fails before anything is
-- added.
local function begin(zset) redis.call('ZREM', zset, 'no message is called so') end

-- Add ids to a sorted set, with one time for all or one for each. If the first time becomes earlier, the watcher waits
-- too long, so the next claim takes over the watch.
local function put(zset, dues, ids)
  if #ids == 0 then return end
  local first, rows, one_score = head(zset), {}, type(dues) == 'number' and score(dues)
  for i, id in ipairs(ids) do pair(rows, one_score or score(dues[i]), id) end
  redis.call('ZADD', zset, unpack(rows))
  if not first or (one_score and dues or math.min(unpack(dues))) < first then
    redis.call('DEL', watch)
    push_token()
  end
end

-- The fields of a stream entry by name.
local function fields_of(entry)
  local fields = {}
  for f = 1, entry and #entry[2] or 0, 2 do fields[entry[2][f]] = entry[2][f + 1] end
  return fields
end

-- The failures of a message, newest first: a note with its time, then up to nine `known` failures, up to 2 KiB.
local function failures(note, known)
  local all, n, most = note .. string.format('\29%.0f', now_down), 1, #note + 2048
  for one in (known or ''):gmatch('[^\30]+') do
    if n < 10 and #all + #one < most then all, n = all .. '\30' .. one, n + 1 end
  end
  return all
end

-- Wake a process for messages that may be claimed.
local function offer() push_token() end

-- Add due messages to ready.
local function line_up(ids)
  if run('LPUSH', ready, ids) then push_token() end
end

-- Add new messages: to ready, or to pending if they are due later.
local function enter(ids, due)
  if due > now_down then return put(pending, due, ids) end
  if run('LPUSH', ready, ids) then push_token() end
end

local function reversed(list)
  local turned = {}
  for i = #list, 1, -1 do turned[#turned + 1] = list[i] end
  return turned
end

-- Return messages to the heads of their key queues, the first of `ids` foremost; return the ids without a key.
local function come_back(ids) return ids end

-- Queue messages for redelivery.
local function redeliver(ids)
  if run('LPUSH', retry, ids) then push_token() end
end

-- Call `meet` for the oldest ids of the lists until `room` messages have started. Return the lists, each with how many
-- ids were met, and which of them go to its far end.
local function serve(lengths, room, meet)
  local rows = {}
  for _, list in ipairs(first == 'retry' and { retry, ready } or { ready, retry }) do
    if room > 0 and lengths[list] > 0 then
      local ids = redis.call('LRANGE', list, -room, -1)
      local row = { list = list, at = #ids, back = {} }
      local words, counts = read('HMGET', lease, unpack(ids)), read('HMGET', retries_left, unpack(ids))
      rows[#rows + 1] = row
      for i = #ids, 1, -1 do
        if meet(row, ids[i], words[i], counts[i]) then room = room - 1 end
      end
    end
  end
  return rows
end

-- Remove the met ids from the heads of their lists.
local function leave_rows(rows)
  for _, row in ipairs(rows) do
    run('LPUSH', row.list, row.back)
    redis.call('LTRIM', row.list, 0, -row.at - 1)
  end
end

local function forget(ids)
  for _, key in ipairs({ retries_left, lease, errors }) do run('HDEL', key, ids) end
end

-- Store how the last `most` messages ended. Written last and never fails, like totals.
local function note_ends(stream, most, kind, ids, notes, letters)
  for i = math.max(1, #ids - most + 1), #ids do
    local note, letter = (notes[i] or ''):match('^[^\29\30]*'), letters[i] or ''
    redis.pcall('XADD', stream, 'MAXLEN', most, '*', 'id', ids[i], 'kind', kind, 'note', note, 'letter', letter)
  end
end

-- End messages without an ack; their last failure is stored with the end.
local function finish(kind, ids)
  local notes = run('HMGET', errors, ids)
  forget(ids)
  add(kind, #ids)
  note_ends(ends, 1000, kind, ids, notes, {})
end

-- For how long each chosen id stays blocked after its end: as given by its publish, else by `spans`.
local function known_spans(ids, spans)
  local known = #ids > 0 and redis.pcall('HMGET', windows, unpack(ids)) or {}
  for j in ipairs(ids) do spans[j] = tonumber(known[j] or spans[j] or 0) or 0 end
  return spans
end

-- Block chosen ids that end, the `at[j]`-th messages of the call. A failure of this write is ignored.
local function take(ids, at, spans)
  if #ids == 0 or #KEYS <= HEAD_KEYS + ITEMS then return end
  for j, ms in ipairs(known_spans(ids, spans)) do
    if ms > 0 then redis.pcall('SET', mark(at[j]), 'ended', 'PX', string.format('%.0f', math.min(ms, 1e15))) end
  end
  redis.pcall('HDEL', windows, unpack(ids))
end

-- Extend a body's expiry and write the new due time into its header; only over a due time with 13 digits.
local function postpone(key, by_ms, due)
  local left = by_ms ~= 0 and redis.call('PTTL', key) or 0
  if left > 0 then
    redis.call('PEXPIRE', key, string.format('%.0f', math.max(1, math.min(left + by_ms, 1e15))))
  end
  local start = bare == '' and redis.pcall('GETRANGE', key, 0, 26)
  if type(start) == 'string' and start:find('^RELIQ/1 {"d":%d%d%d%d%d%d%d%d%d%d%d%d%d[,}]') then
    redis.call('SETRANGE', key, 13, string.format('%013.0f', math.min(due, 9999999999999)))
  end
end

-- The stored answer to this call number (nil for a new number, 'stale' after a later call), and the lane's old value.
local function recall()
  local kept = read('GET', lane)
  local last, answer = (kept or ''):match('^(%d+) (.*)$')
  if not last or tonumber(last) < tonumber(number) then return nil, kept end
  return last == number and answer or 'stale', kept
end
local function remember(answer, ttl_ms) redis.call('SET', lane, number .. ' ' .. answer, 'PX', ttl_ms) end

-- Why the i-th message's chosen id is not published; `revive` if the old message is cancelled but still in a list.
local function standing(i, id)
  local ended = replace == '' and read('GET', mark(i))
  if ended and ended ~= 'freed' then return ended == 'ended' and 'duplicate' or 'tombstoned' end
  if read('SISMEMBER', garbage, id) == 1 then return 'duplicate' end
  if read('HEXISTS', retries_left, id) == 0 then return nil end
  local in_list = read('HGET', lease, id) == '!' and not read('ZSCORE', unack, id)
  return in_list and 'revive' or 'duplicate'
end

-- The epoch of a fence `EPOCH N WAS`; 0 for a value that reliq did not write, which is ignored.
local function epoch_of(text)
  local found = tonumber(text:match('^(%d+) %d+ %d+') or 0)
  return found <= 1000000000 and found or 0
end

-- The answer to a publisher with an outdated map (if that `binds`) or to a publish into a closed shard, else nil; and
-- whether the fence must be raised. An empty `known` needs no check, because shard 0 is never closed. A call with
-- `never` is always refused.
local function fence(binds)
  if known == '' then return nil, false end
  local text = read('GET', epoch) or ''
  local least, mine = epoch_of(text), epoch_of(known)
  if mine > least then return nil, true end
  local refuses = known == 'never' or least > 0 and (text:find('closed') or (binds and mine < least))
  return refuses and 'epoch ' .. text or nil, false
end

-- The ids; the indexes of valid receipts; the ids of cancelled messages (unless they count as valid), and the ids with
-- an invalid receipt; the state words; and for each id the index of its valid receipt, cancelled or not. A receipt is
-- valid if the id is in unack with the state word LANE.NUMBER.
local function receipts(with_cancelled)
  local ids, held, stopped, lost, seen = {}, {}, {}, {}, {}
  for i = 1, ITEMS do ids[i] = arg(i, ID) end
  local words, places = run('HMGET', lease, ids), run('ZMSCORE', unack, ids)
  for i, id in ipairs(ids) do
    local nonce, word = arg(i, NONCE), places[i] and not seen[id] and words[i]
    local holds = word and (word == nonce or word:match('^[^:!]*') == nonce:match('^[^:]*'))
    local fate = not holds and lost or cancelled(word) and not with_cancelled and stopped or held
    fate[#fate + 1], seen[id] = fate == held and i or id, seen[id] or holds and i
  end
  return ids, held, stopped, lost, words, seen
end

-- End messages that were cancelled in flight.
local function stop(ids)
  run('ZREM', unack, ids)
  finish('cancelled', ids)
end
