-- Scripts share this text. The loader writes a script's KEYS and ARGV as locals from its header, then the functions
-- that it uses from here, then a read of every key's type, then the script itself, which reads first, then adds, then
-- removes: a script that is cut off half-way delivers something twice, and loses nothing.
-- A message's place in the tails: `arg(i, NAME)` and `body(i)`; `mark(j)` is the j-th dedup key.
--
-- The state word of a message is its field in `lease`. Without one the message waits, or was leased by a foreign
-- consumer. D is a number of 1 to 99, times are in ms.
--
--   word             where the id is   meaning
--   LANE.NUMBER:MS   unack             held since that call of that lane; MS is the longest lease it was given
--   D~LANE.NUMBER:MS unack             the same, after D deliveries in a row that ended by their lease
--   HELD!            unack             held, by either word, and cancelled: ends with the delivery
--   !                ready, retry      cancelled: the claim that meets it drops it; in unack of what no word held
--   nacked           unack             waits for its redelivery
--   suspect          unack, a list     waits after a delivery that ended by its lease
--   suspectD         unack, a list     the same, after D deliveries in a row
--   @MS              ready, retry      the claim that meets it moves it to pending, due at MS; once also `@MS?`

-- Now, in ms. Rounded up where it makes a due time or a deadline, down where it decides
-- whether one has passed: nothing is ever early.
local time = clock == '' and redis.call('TIME') or { 0, clock }
local us = time[1] * 1000000 + time[2]
local now_up, now_down = math.ceil(us / 1000), math.floor(us / 1000)

local function arg(i, field) return ARGV[HEAD_ARGS + (i - 1) * TAIL_ARGS + field] end
local function body(i) return KEYS[HEAD_KEYS + i] end
local function all_bodies() return unpack(KEYS, HEAD_KEYS + 1, HEAD_KEYS + ITEMS) end
local function mark(j) return KEYS[#KEYS - ITEMS + j] end

-- Read a key; one of another type ends the script, by name, before it has written anything.
local function read(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  local why = type(answer) == 'table' and answer.err
  if not why then return answer end
  error(why .. (why:find('WRONGTYPE') and ' RELIQ_KEY ' .. key .. ' ' or ' (' .. command .. ' ' .. key .. ')'), 0)
end

-- Run a command on a key and a list of arguments; none runs nothing and is false.
local function run(command, key, list) return #list > 0 and redis.call(command, key, unpack(list)) end
local function pair(list, one, other)
  local n = #list
  list[n + 1], list[n + 2] = one, other
end

local function score(ms) return string.format('%.3f', ms / 1000) end
local function ms_of(text) return math.floor(text * 1000 + 0.5) end

-- A message's count of retries, behind which its key may stand. One that is missing or no number is 0, as one below it is.
local function count(text)
  local left = text and (text:match('^%d+$') or text:match('^(%d+) .'))
  return left and math.min(tonumber(left), 1000000) or 0
end
local function cancelled(word) return word and word:sub(-1) == '!' end

-- How many deliveries in a row a message has not survived, by its state word.
local function deaths(word)
  local waiting = word:match('^suspect(%d*)$')
  return waiting == '' and 1 or math.min(tonumber(waiting or word:match('^(%d+)~') or 0), 99)
end
local function word_of(died) return died > 0 and string.format('%.0f~', died) .. nonce or nonce end
local function suspect(died) return 'suspect' .. (died > 1 and string.format('%.0f', died) or '') end

-- Whether a message that died so often may run beside the suspects that its process holds.
local function may_run(died, left)
  if died == 0 then return true end
  local room = (died > 2 or left == 0) and 1 or math.max(1, math.floor(slots / 2 ^ died))
  if suspects + 1 > math.min(room, narrowest) then return false end
  suspects, narrowest = suspects + 1, math.min(room, narrowest)
  return true
end

-- Whether a message in unack is held by nobody: it waits there until it is delivered again.
local function waits(word) return word == 'nacked' or (word or ''):find('^suspect') end

-- Totals come last and never fail: an account off by one beats a message lost.
local function add(kind, n) return n > 0 and redis.pcall('HINCRBY', totals, kind, n) end

-- A number above all that claims were given before: the time, unless the clock went back, or a replica was promoted
-- whose clock is behind. A key of another type is refused here, by name; a number that no claim writes is none.
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

-- ms until the head of `zset` is due, at most a day, -1 when it is empty.
local function wait_for(zset)
  local due = head(zset)
  return due and math.max(0, math.min(due - now_down, 86400000)) or -1
end

-- Watch for the next times of pending and unack unless another process does: ms until each, or -2. A watch that would last
-- for longer than its two seconds, or for ever, is nobody's.
local function watch_for_due()
  local left = watcher ~= '' and redis.call('PTTL', watch)
  if not left or (left >= 0 and left <= 2000 and redis.pcall('GET', watch) ~= watcher) then return -2, -2 end
  redis.call('DEL', watch)
  redis.call('SET', watch, watcher, 'PX', 2000)
  return wait_for(pending), wait_for(unack)
end

-- The first write of what drains: the removal that it ends with, of nothing. Redis refuses a script at `maxmemory`
-- its first write alone, so that all others pass; and who may not remove is refused before anything is added.
local function begin(zset) redis.call('ZREM', zset, 'no message is called so') end

-- Put ids into a sorted set, all at one time or each at its own; when that makes its head sooner, whoever watches
-- knows too late a time: the next claim watches instead.
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

-- The fields of an entry of a stream by their names.
local function fields_of(entry)
  local fields = {}
  for f = 1, entry and #entry[2] or 0, 2 do fields[entry[2][f]] = entry[2][f + 1] end
  return fields
end

-- Why a message failed, the newest first: a note, when it failed, and at most nine of those `known`, in 2 KiB.
local function failures(note, known)
  local all, n, most = note .. string.format('\29%.0f', now_down), 1, #note + 2048
  for one in (known or ''):gmatch('[^\30]+') do
    if n < 10 and #all + #one < most then all, n = all .. '\30' .. one, n + 1 end
  end
  return all
end

-- Wake somebody for messages that may be claimed.
local function offer() push_token() end

-- Messages that are due come to ready.
local function line_up(ids)
  if run('LPUSH', ready, ids) then push_token() end
end

-- Messages that nobody holds come in: into ready, or into pending when they are due later.
local function enter(ids, due)
  if due > now_down then return put(pending, due, ids) end
  if run('LPUSH', ready, ids) then push_token() end
end

local function reversed(list)
  local turned = {}
  for i = #list, 1, -1 do turned[#turned + 1] = list[i] end
  return turned
end

-- Messages come back to the heads of the lines of their keys, the first of `ids` foremost; return those without a key.
local function come_back(ids) return ids end

-- Messages are to be delivered again.
local function redeliver(ids)
  if run('LPUSH', retry, ids) then push_token() end
end

-- Have `meet` decide on the oldest ids of the lists, which are so long, until `room` messages have started; return the
-- lists, each with how many of its ids were met, and those of them that go to its far end.
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

-- The ids that were met leave the heads of their lists.
local function leave_rows(rows)
  for _, row in ipairs(rows) do
    run('LPUSH', row.list, row.back)
    redis.call('LTRIM', row.list, 0, -row.at - 1)
  end
end

local function forget(ids)
  for _, key in ipairs({ retries_left, lease, errors }) do run('HDEL', key, ids) end
end

-- How messages ended, the last `most` of them. As totals: late, and never in the way.
local function note_ends(stream, most, kind, ids, notes, letters)
  for i = math.max(1, #ids - most + 1), #ids do
    local note, letter = (notes[i] or ''):match('^[^\29\30]*'), letters[i] or ''
    redis.pcall('XADD', stream, 'MAXLEN', most, '*', 'id', ids[i], 'kind', kind, 'note', note, 'letter', letter)
  end
end

-- End messages in any way but by an ack; what last went wrong with them is kept with their end.
local function finish(kind, ids)
  local notes = run('HMGET', errors, ids)
  forget(ids)
  add(kind, #ids)
  note_ends(ends, 1000, kind, ids, notes, {})
end

-- For how long each chosen id stays taken after its end: as its publish said, or else as `spans` says.
local function known_spans(ids, spans)
  local known = #ids > 0 and redis.pcall('HMGET', windows, unpack(ids)) or {}
  for j in ipairs(ids) do spans[j] = tonumber(known[j] or spans[j] or 0) or 0 end
  return spans
end

-- Chosen ids that end, the `at[j]`-th messages of the tail, stay taken. That it cannot be noted stops nothing.
local function take(ids, at, spans)
  if #ids == 0 or #KEYS <= HEAD_KEYS + ITEMS then return end
  for j, ms in ipairs(known_spans(ids, spans)) do
    if ms > 0 then redis.pcall('SET', mark(at[j]), 'ended', 'PX', string.format('%.0f', math.min(ms, 1e15))) end
  end
  redis.pcall('HDEL', windows, unpack(ids))
end

-- Move a body's expiry and write the new due time into its header, if it has one of 13 digits; a bare body never has.
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

-- A lane's answer to this call number (nil when it is new, 'stale' when a later one ran), and its value before.
local function recall()
  local kept = read('GET', lane)
  local last, answer = (kept or ''):match('^(%d+) (.*)$')
  if not last or tonumber(last) < tonumber(number) then return nil, kept end
  return last == number and answer or 'stale', kept
end
local function remember(answer, ttl_ms) redis.call('SET', lane, number .. ' ' .. answer, 'PX', ttl_ms) end

-- Why a chosen id is not published, the i-th of the tail; `revive` when it is cancelled and still in a list.
local function standing(i, id)
  local ended = replace == '' and read('GET', mark(i))
  if ended and ended ~= 'freed' then return ended == 'ended' and 'duplicate' or 'tombstoned' end
  if read('SISMEMBER', garbage, id) == 1 then return 'duplicate' end
  if read('HEXISTS', retries_left, id) == 0 then return nil end
  local in_list = read('HGET', lease, id) == '!' and not read('ZSCORE', unack, id)
  return in_list and 'revive' or 'duplicate'
end

-- The epoch of a fence, `EPOCH N WAS`; 0 of what no reliq writes, which holds nobody up.
local function epoch_of(text)
  local found = tonumber(text:match('^(%d+) %d+ %d+') or 0)
  return found <= 1000000000 and found or 0
end

-- What a shard answers who knows too early a map (when that `binds`) or would fill a closed shard, else nil; and
-- whether the shard has yet to hear of this epoch. Who says none has nothing to ask: shard 0 is never closed. A call
-- that says `never` is refused, also by a shard without a fence.
local function fence(binds)
  if known == '' then return nil, false end
  local text = read('GET', epoch) or ''
  local least, mine = epoch_of(text), epoch_of(known)
  if mine > least then return nil, true end
  local refuses = known == 'never' or least > 0 and (text:find('closed') or (binds and mine < least))
  return refuses and 'epoch ' .. text or nil, false
end

-- The ids of the tail; the indexes of receipts that hold; the ids whose message was cancelled (unless they count as
-- any other), and those whose receipt no longer holds; the state words; and for each id the index of the receipt that
-- holds, cancelled or not. A receipt is LANE.NUMBER, and a place in unack.
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

-- End what was cancelled while it was held.
local function stop(ids)
  run('ZREM', unack, ids)
  finish('cancelled', ids)
end
