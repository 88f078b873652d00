-- Functions that all scripts share. The loader builds a script from local variables for the KEYS and ARGV in its
-- header, the functions of this file that it uses, a read of each key that checks the key's type, and the script's own
-- code.
--
-- A script reads first, then adds, then removes. So an interrupted script may deliver a message twice, but loses no
-- message.
--
-- `arg(i, NAME)` is an argument of the i-th message, `body(i)` the Redis key of its body, and `mark(j)` the j-th dedup
-- key. KEYS and ARGV after `|` in a header are repeated for each message.
--
-- The state word of a message is its value in the hash `lease`. A message without a state word waits, or was leased by
-- a consumer in Go. D is a number from 1 to 99. MS and DUE are times in ms. LEASED stands for one of the first two
-- words in this table.
--
--   word             where the id is      meaning
--   LANE.NUMBER:MS   unack                leased by the call NUMBER of LANE (a call sequence); MS is the longest lease
--                                         that it was given, or 0 after its process died
--   D~LANE.NUMBER:MS unack                leased, after D deliveries in a row that ended with an expired lease
--   LEASED+DUE.N     unack                leased, with a successor that is due at DUE and has N retries; `>MS` at the
--                                         end: the successor is debounced, and was first published at MS
--   >MS              pending              debounced, and first published at MS
--   LEASED!          unack                leased and cancelled: ends with this delivery; with a successor, `!` is at
--                                         the end
--   !                ready, retry         cancelled: the next claim removes it
--   !                unack                leased without a state word, and cancelled
--   purged!          ready, retry         purged: the next claim removes it, and counts it as purged
--   nacked           unack                waits for its redelivery
--   suspect          unack, ready, retry  waits after a delivery that ended with an expired lease
--   suspectD         unack, ready, retry  waits after D such deliveries in a row
--   @MS              ready, retry         the next claim moves it to pending, due at MS; an older version wrote `@MS?`

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

-- Return the retries left from a stored text, such as `3` or, with a message key, `3 tenant-7`. An invalid, missing or
-- negative number counts as 0.
local function count(text)
  local left = text and (text:match('^%d+$') or text:match('^(%d+) .'))
  return left and math.min(tonumber(left), 1000000) or 0
end
local function cancelled(word) return word and word:sub(-1) == '!' end

-- Return due time, retries and time of the first publish of a running message's successor, read from the state word;
-- nil without a successor.
local function heir(word) return (word or ''):match('%+(%d+)%.(%d+)(>?%d*)') end

-- Return how many deliveries in a row ended with an expired lease (deaths), from the state word.
local function deaths(word)
  local waiting = word:match('^suspect(%d*)$')
  return waiting == '' and 1 or math.min(tonumber(waiting or word:match('^(%d+)~') or 0), 99)
end
local function word_of(died) return died > 0 and string.format('%.0f~', died) .. nonce or nonce end
local function suspect(died) return 'suspect' .. (died > 1 and string.format('%.0f', died) or '') end

-- Return whether a message with `died` deaths may run beside the suspects of its process. If it may, count it as a
-- suspect.
local function may_run(died, left)
  if died == 0 then return true end
  local room = (died > 2 or left == 0) and 1 or math.max(1, math.floor(slots / 2 ^ died))
  if suspects + 1 > math.min(room, narrowest) then return false end
  suspects, narrowest = suspects + 1, math.min(room, narrowest)
  return true
end

-- Return whether a message in unack waits for its next delivery, without a lease.
local function waits(word) return word == 'nacked' or (word or ''):find('^suspect') end

-- Add `n` to a total. Ignore an error, because a wrong total is better than a lost message.
local function add(kind, n) return n > 0 and redis.pcall('HINCRBY', totals, kind, n) end

-- Return a fencing token that is larger than all earlier tokens: the current time, or the last token plus 1 if the
-- clock went back. Ignore an invalid last token; raise an error if its key has the wrong type.
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

-- Return the ms until the first id of `zset` is due, at most a day; -1 if `zset` is empty.
local function wait_for(zset)
  local due = head(zset)
  return due and math.max(0, math.min(due - now_down, 86400000)) or -1
end

-- Make the calling process the watcher, which waits for the next due times of pending and unack. Return the ms until
-- each due time. If another process is the watcher, return -2 twice. Ignore a watch of more than two seconds, because
-- it is invalid.
local function watch_for_due()
  local left = watcher ~= '' and redis.call('PTTL', watch)
  if not left or (left >= 0 and left <= 2000 and redis.pcall('GET', watch) ~= watcher) then return -2, -2 end
  redis.call('DEL', watch)
  redis.call('SET', watch, watcher, 'PX', 2000)
  return wait_for(pending), wait_for(unack)
end

-- Remove an id that does not exist, as the first write of a script. At `maxmemory` Redis checks only the first write,
-- and always allows a removal, so it allows all writes of the script. If the Redis user may not remove, the script
-- fails here, before it adds anything.
local function begin(zset) redis.call('ZREM', zset, 'no message is called so') end

-- Add ids to a sorted set; `dues` is one time for all ids, or a list with a time for each id. If the set's earliest
-- time becomes earlier, the current watcher would wait too long. Then delete the watch, so that the next claim makes
-- its process the watcher.
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

-- Return a table of a stream entry's values by field name.
local function fields_of(entry)
  local fields = {}
  for f = 1, entry and #entry[2] or 0, 2 do fields[entry[2][f]] = entry[2][f + 1] end
  return fields
end

-- Return the failure notes of a message: the new note with its time, then up to nine of its earlier notes (`known`), in
-- at most 2 KiB.
local function failures(note, known)
  local all, n, most = note .. string.format('\29%.0f', now_down), 1, #note + 2048
  for one in (known or ''):gmatch('[^\30]+') do
    if n < 10 and #all + #one < most then all, n = all .. '\30' .. one, n + 1 end
  end
  return all
end

-- Wake a process, because messages may be claimed.
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

-- Put messages back at the heads of their key queues, and return the ids without a key. In a queue without keys, return
-- all ids.
local function come_back(ids) return ids end

-- Queue messages for redelivery.
local function redeliver(ids)
  if run('LPUSH', retry, ids) then push_token() end
end

-- Call `meet` for the oldest ids of ready and retry, until `room` messages have started. `meet` decides on a message
-- and returns whether it starts. `serve` returns a row for each list: `at` is how many of its ids were passed to
-- `meet`, and `back` has the ids that move to the tail of the list.
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

-- Remove the ids that were passed to `meet` from the heads of their lists, and add the ids in `back` to the tails.
local function leave_rows(rows)
  for _, row in ipairs(rows) do
    run('LPUSH', row.list, row.back)
    redis.call('LTRIM', row.list, 0, -row.at - 1)
  end
end

local function forget(ids)
  for _, key in ipairs({ retries_left, lease, errors }) do run('HDEL', key, ids) end
end

-- Store in a stream how messages ended, and keep the last `most` entries. Ignore errors: the messages end anyway.
local function note_ends(stream, most, kind, ids, notes, letters)
  for i = math.max(1, #ids - most + 1), #ids do
    local note, letter = (notes[i] or ''):match('^[^\29\30]*'), letters[i] or ''
    redis.pcall('XADD', stream, 'MAXLEN', most, '*', 'id', ids[i], 'kind', kind, 'note', note, 'letter', letter)
  end
end

-- Count messages that ended, and store how they ended.
local function count_ends(kind, ids, notes, letters)
  add(kind, #ids)
  note_ends(ends, 1000, kind, ids, notes or {}, letters or {})
end

-- Remove messages that end without an ack. The record of their end in `ends` gets their last failure.
local function finish(kind, ids)
  local notes = run('HMGET', errors, ids)
  forget(ids)
  count_ends(kind, ids, notes)
end

-- Call `how('cancelled', …)` for the ids that a cancel marked in their list, and `how('purged', …)` for the ids that a
-- purge marked.
local function by_end(ids, words, how)
  local cancels, purges = {}, {}
  for _, id in ipairs(ids) do table.insert(words[id] == 'purged!' and purges or cancels, id) end
  if #cancels > 0 then how('cancelled', cancels) end
  if #purges > 0 then how('purged', purges) end
end

-- Return for how many ms each id that a publisher chose stays blocked after its message has ended: the time that the
-- publish set, or else the time in `spans`.
local function known_spans(ids, spans)
  local known = #ids > 0 and redis.pcall('HMGET', windows, unpack(ids)) or {}
  for j in ipairs(ids) do spans[j] = tonumber(known[j] or spans[j] or 0) or 0 end
  return spans
end

-- Block chosen ids after their end. `at` has the index of each message in the call. Ignore a failed write.
local function take(ids, at, spans)
  if #ids == 0 or #KEYS <= HEAD_KEYS + ITEMS then return end
  for j, ms in ipairs(known_spans(ids, spans)) do
    if ms > 0 then redis.pcall('SET', mark(at[j]), 'ended', 'PX', string.format('%.0f', math.min(ms, 1e15))) end
  end
  redis.pcall('HDEL', windows, unpack(ids))
end

-- Extend the expiry of a body by `by_ms`. If its header has a due time of 13 digits, overwrite it with `due`.
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

-- Return the answer that Redis stores for this call number; nil for a new number; 'stale' if the lane (call sequence)
-- has had a later call. Also return the stored text of the lane.
local function recall()
  local kept = read('GET', lane)
  local last, answer = (kept or ''):match('^(%d+) (.*)$')
  if not last or tonumber(last) < tonumber(number) then return nil, kept end
  return last == number and answer or 'stale', kept
end
local function remember(answer, ttl_ms) redis.call('SET', lane, number .. ' ' .. answer, 'PX', ttl_ms) end

-- Return why the chosen id of the i-th message must not be published; nil if it may be published. `revive` means that
-- it may be published, but a cancelled message with this id is still in a list.
local function standing(i, id)
  local ended = replace == '' and read('GET', mark(i))
  if ended and ended ~= 'freed' then return ended == 'ended' and 'duplicate' or 'tombstoned' end
  if read('SISMEMBER', garbage, id) == 1 then return 'duplicate' end
  if read('HEXISTS', retries_left, id) == 0 then return nil end
  local word = read('HGET', lease, id)
  local in_list = (word == '!' or word == 'purged!') and not read('ZSCORE', unack, id)
  return in_list and 'revive' or 'duplicate'
end

-- Return the version (epoch) in the text `EPOCH N WAS` of a shard map; 0 for a text that reliq did not write.
local function epoch_of(text)
  local found = tonumber(text:match('^(%d+) %d+ %d+') or 0)
  return found <= 1000000000 and found or 0
end

-- Check `known`, the version of the publisher's shard map. Return a refusal if the shard is closed, or if the map is
-- outdated and `binds` is true; otherwise return nil. Also return whether the map is newer, so that the shard must
-- store its version. An empty `known` is not checked, because shard 0 is never closed. The version `never` is always
-- refused.
local function fence(binds)
  if known == '' then return nil, false end
  local text = read('GET', epoch) or ''
  local least, mine = epoch_of(text), epoch_of(known)
  if mine > least then return nil, true end
  local refuses = known == 'never' or least > 0 and (text:find('closed') or (binds and mine < least))
  return refuses and 'epoch ' .. text or nil, false
end

-- Return LANE.NUMBER from a nonce, or from the state word of a leased message; nil for any other word.
local function call_of(word) return word:match('([^~:]*):') end

-- Check the receipts of the call. Return six values: all ids; the indexes of the valid receipts; the ids of cancelled
-- messages; the ids with an invalid receipt; the state words; and for each id the index of its valid receipt. If
-- `with_cancelled` has a value, the receipts of cancelled messages are among the valid receipts. A receipt is valid if
-- the id is in unack and its state word has the receipt's LANE.NUMBER; a checkpoint may have removed `D~` from the
-- word.
--
-- If a message has a successor, its receipt counts as invalid, and its id is returned in its own list, because only
-- `succeed` may end the message. If `with_cancelled` is 'heir' (in `succeed`), this applies to messages without a
-- successor instead. If it is 'any', successors make no difference.
local function receipts(with_cancelled)
  local ids, held, stopped, lost, seen = {}, {}, {}, {}, {}
  for i = 1, ITEMS do ids[i] = arg(i, ID) end
  local words, places = run('HMGET', lease, ids), run('ZMSCORE', unack, ids)
  for i, id in ipairs(ids) do
    local nonce, word = arg(i, NONCE), places[i] and not seen[id] and words[i]
    local holds = word and (word == nonce or call_of(word) ~= nil and call_of(word) == call_of(nonce))
    local has_heir = holds and word ~= nonce and heir(word) ~= nil
    local follows = holds and with_cancelled ~= 'any' and has_heir ~= (with_cancelled == 'heir')
    local fate = (not holds or follows) and lost or cancelled(word) and not with_cancelled and stopped or held
    fate[#fate + 1], seen[id] = fate == held and i or follows and { id } or id, seen[id] or holds and not follows and i
  end
  return ids, held, stopped, lost, words, seen
end

-- End messages that were cancelled in flight.
local function stop(ids)
  run('ZREM', unack, ids)
  finish('cancelled', ids)
end
