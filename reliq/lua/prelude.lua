-- Lua functions that all scripts share. The loader builds the code that Redis runs from four parts: local variables
-- for the KEYS and ARGV in the header of the script, the functions of this file that the script uses, checks of the
-- types of its Redis keys, and the code of the script.
--
-- A script first reads, then adds data, then removes data. So if Redis stops in the middle of a script, a message may
-- be delivered twice, but no message is lost.
--
-- In a header, a call repeats the KEYS and ARGV after `|` for each message. `arg(i, NAME)` returns the argument NAME of
-- the i-th message, `body(i)` returns the Redis key of its body, and `mark(i)` its deduplication key.
--
-- The hash `lease` stores the state word of each message, in one of the forms below. A message without a state word
-- waits, or a consumer in Go has leased it. D is a number from 1 to 99. MS and DUE are times in ms. LEASED stands for
-- one of the first two words in this table.
--
--   word             where the id is      meaning
--   LANE.NUMBER:MS   unack                leased by the claim with the call number NUMBER in the lane LANE (a sequence
--                                         of script calls). MS is the longest time of the lease, or 0 after its
--                                         worker process died
--   D~LANE.NUMBER:MS unack                leased, after D deliveries in a row that ended with an expired lease
--   LEASED+DUE.N     unack                leased, with a successor that is due at DUE and has N retries. With `>MS` at
--                                         the end, the successor is debounced, and was first published at MS
--   >MS              pending              debounced, and first published at MS
--   LEASED!          unack                leased and cancelled: the message ends after this delivery. If it has a
--                                         successor, `!` is at the end of the word
--   !                ready, retry         cancelled: the next claim removes the message
--   !                unack                leased without a state word, and cancelled
--   purged!          ready, retry         purged: the next claim removes the message, and counts it as purged
--   nacked           unack                waits for its redelivery
--   suspect          unack, ready, retry  waits after a delivery that ended with an expired lease
--   suspectD         unack, ready, retry  waits after D deliveries in a row that ended with an expired lease
--   @MS              ready, retry         the next claim moves the message to pending, due at MS. An older version of
--                                         reliq wrote `@MS?`

-- The current time in ms. `now_up` is rounded up, to compute due times and deadlines. `now_down` is rounded down, to
-- check whether they have passed. So no message is due too early, and no lease expires too early.
local time = clock == '' and redis.call('TIME') or { 0, clock }
local us = time[1] * 1000000 + time[2]
local now_up, now_down = math.ceil(us / 1000), math.floor(us / 1000)

local function arg(i, field) return ARGV[HEAD_ARGS + (i - 1) * TAIL_ARGS + field] end
local function body(i) return KEYS[HEAD_KEYS + i] end
local function all_bodies() return unpack(KEYS, HEAD_KEYS + 1, HEAD_KEYS + ITEMS) end
local function mark(j) return KEYS[#KEYS - ITEMS + j] end

-- Run a read command on a Redis key. If this fails, raise an error with the name of the key, before the script has
-- written anything.
local function read(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  local why = type(answer) == 'table' and answer.err
  if not why then return answer end
  error(why .. (why:find('WRONGTYPE') and ' RELIQ_KEY ' .. key .. ' ' or ' (' .. command .. ' ' .. key .. ')'), 0)
end

-- Run a Redis command on a key with the arguments in `list`. If the list is empty, run nothing and return false.
local function run(command, key, list) return #list > 0 and redis.call(command, key, unpack(list)) end
local function pair(list, one, other)
  local n = #list
  list[n + 1], list[n + 2] = one, other
end

local function score(ms) return string.format('%.3f', ms / 1000) end
local function ms_of(text) return math.floor(text * 1000 + 0.5) end

-- Decode the number of retries left from a value of the hash `retries_left`, such as `3` or, with a message key,
-- `3 tenant-7`. A missing, invalid or negative number counts as 0.
local function count(text)
  local left = text and (text:match('^%d+$') or text:match('^(%d+) .'))
  return left and math.min(tonumber(left), 1000000) or 0
end
local function cancelled(word) return word and word:sub(-1) == '!' end

-- From the state word of a running message, return the due time of its successor, the successor's retries, and the time
-- of its first publish. Return nil if the message has no successor.
local function heir(word) return (word or ''):match('%+(%d+)%.(%d+)(>?%d*)') end

-- From the state word of a message, return how many of its deliveries in a row ended with an expired lease. The scripts
-- call such a delivery a death, because the message may have killed its worker process.
local function deaths(word)
  local waiting = word:match('^suspect(%d*)$')
  return waiting == '' and 1 or math.min(tonumber(waiting or word:match('^(%d+)~') or 0), 99)
end
local function word_of(died) return died > 0 and string.format('%.0f~', died) .. nonce or nonce end
local function suspect(died) return 'suspect' .. (died > 1 and string.format('%.0f', died) or '') end

-- Return whether a process may start a message that has had `died` deaths (deliveries that ended with an expired
-- lease), besides the suspects (messages with deaths) that the process already has. A message with deaths that may
-- start then counts as a suspect of the process.
local function may_run(died, left)
  if died == 0 then return true end
  local room = (died > 2 or left == 0) and 1 or math.max(1, math.floor(slots / 2 ^ died))
  if suspects + 1 > math.min(room, narrowest) then return false end
  suspects, narrowest = suspects + 1, math.min(room, narrowest)
  return true
end

-- Return whether the state word of a message in `unack` means that the message waits for its redelivery. Otherwise a
-- worker has its lease.
local function waits(word) return word == 'nacked' or (word or ''):find('^suspect') end

-- Add `n` to one of the queue's totals, such as `acked`. Ignore an error of Redis, because a wrong total is better than
-- a lost message.
local function add(kind, n) return n > 0 and redis.pcall('HINCRBY', totals, kind, n) end

-- Return and store a new fencing token, which is larger than all earlier tokens of the queue. The token is the current
-- time or, if the clock was set back, the last token plus 1. If the stored last token is invalid, ignore it. If its
-- Redis key has the wrong type, raise an error.
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

-- Return the ms until the earliest time in the sorted set `zset`, at most a day. Return -1 if the sorted set is empty.
local function wait_for(zset)
  local due = head(zset)
  return due and math.max(0, math.min(due - now_down, 86400000)) or -1
end

-- Make the process that runs this script call the watcher of the queue, if no other process is the watcher. The watcher
-- calls `promote` and `reclaim` when they are due. Return the ms until the next due time in `pending` and until the
-- next deadline in `unack`, or -2 and -2 if another process is the watcher. A process is the watcher for two seconds.
-- If the Redis key `watch` has a longer TTL, it is invalid, so replace it.
local function watch_for_due()
  local left = watcher ~= '' and redis.call('PTTL', watch)
  if not left or (left >= 0 and left <= 2000 and redis.pcall('GET', watch) ~= watcher) then return -2, -2 end
  redis.call('DEL', watch)
  redis.call('SET', watch, watcher, 'PX', 2000)
  return wait_for(pending), wait_for(unack)
end

-- Begin the writes of a script: remove an id that does not exist from the sorted set `zset`. When Redis is full
-- (`maxmemory`), it checks only the first write of a script, and it always allows a removal. So it also allows all
-- further writes of the script. If the Redis user has no permission to remove ids, the script fails here, before it
-- adds anything.
local function begin(zset) redis.call('ZREM', zset, 'no message is called so') end

-- Add message ids with their due times to the sorted set `zset`. `dues` is a time for all ids, or a list with a time
-- for each id. If one of these times becomes the earliest time of the sorted set, the process that waits for the next
-- due time (the watcher) would wait too long. Then delete the Redis key `watch`, so that the process with the next
-- claim becomes the watcher.
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

-- Return a table with the values of a stream entry by their field names.
local function fields_of(entry)
  local fields = {}
  for f = 1, entry and #entry[2] or 0, 2 do fields[entry[2][f]] = entry[2][f + 1] end
  return fields
end

-- Return the text that stores the failures of a message: the new failure `note` with the current time, then at most
-- nine of the message's earlier failures (`known`), of at most 2 KiB together.
local function failures(note, known)
  local all, n, most = note .. string.format('\29%.0f', now_down), 1, #note + 2048
  for one in (known or ''):gmatch('[^\30]+') do
    if n < 10 and #all + #one < most then all, n = all .. '\30' .. one, n + 1 end
  end
  return all
end

-- Wake a waiting worker process, because it can claim messages.
local function offer() push_token() end

-- Add due messages to `ready`, and wake a worker process.
local function line_up(ids)
  if run('LPUSH', ready, ids) then push_token() end
end

-- Add new messages to `ready`, or to `pending` if they are due later.
local function enter(ids, due)
  if due > now_down then return put(pending, due, ids) end
  if run('LPUSH', ready, ids) then push_token() end
end

local function reversed(list)
  local turned = {}
  for i = #list, 1, -1 do turned[#turned + 1] = list[i] end
  return turned
end

-- In a queue with message keys, `come_back` returns messages with a key to the heads of their key queues, and returns
-- the ids of messages without a key. In a queue without keys, as here, it only returns all ids.
local function come_back(ids) return ids end

-- Add messages to `retry` for their redelivery, and wake a worker process.
local function redeliver(ids)
  if run('LPUSH', retry, ids) then push_token() end
end

-- Call the function `meet` for the oldest ids in `ready` and `retry`, until `room` messages are claimed. `meet` decides
-- whether a message is claimed, and returns true if it is. `serve` returns a table for each list: `at` is how many of
-- the list's ids were passed to `meet`, and `back` has the ids that will move to the tail of the list.
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

-- After `serve`, remove the ids that it has passed to `meet` from the heads of `ready` and `retry`. Add the ids in
-- `back` to the tails of these lists.
local function leave_rows(rows)
  for _, row in ipairs(rows) do
    run('LPUSH', row.list, row.back)
    redis.call('LTRIM', row.list, 0, -row.at - 1)
  end
end

local function forget(ids)
  for _, key in ipairs({ retries_left, lease, errors }) do run('HDEL', key, ids) end
end

-- Add an entry to the Redis stream `stream` for each message that ended, with the kind of its end (such as `acked`).
-- The stream keeps its last `most` entries. Ignore errors of Redis, because the messages must end in any case.
local function note_ends(stream, most, kind, ids, notes, letters)
  for i = math.max(1, #ids - most + 1), #ids do
    local note, letter = (notes[i] or ''):match('^[^\29\30]*'), letters[i] or ''
    redis.pcall('XADD', stream, 'MAXLEN', most, '*', 'id', ids[i], 'kind', kind, 'note', note, 'letter', letter)
  end
end

-- Add messages that ended to the total `kind`, and to the stream `ends`, which has the last 1000 ends without an ack.
local function count_ends(kind, ids, notes, letters)
  add(kind, #ids)
  note_ends(ends, 1000, kind, ids, notes or {}, letters or {})
end

-- Delete the data of messages that end without an ack. Add an entry with the last failure of each message to the stream
-- `ends`.
local function finish(kind, ids)
  local notes = run('HMGET', errors, ids)
  forget(ids)
  count_ends(kind, ids, notes)
end

-- If a message is in a list, a cancel or a purge only changes its state word, and a later script call ends the message.
-- To end such messages, call the function `how`: with 'cancelled' for the cancelled ids, and with 'purged' for the
-- purged ids. `words` has the state word of each id.
local function by_end(ids, words, how)
  local cancels, purges = {}, {}
  for _, id in ipairs(ids) do table.insert(words[id] == 'purged!' and purges or cancels, id) end
  if #cancels > 0 then how('cancelled', cancels) end
  if #purges > 0 then how('purged', purges) end
end

-- Return for how many ms each chosen id stays blocked after its message has ended. This time is stored in the hash
-- `windows` when the message is published. If an id has no stored time, return its time in `spans`.
local function known_spans(ids, spans)
  local known = #ids > 0 and redis.pcall('HMGET', windows, unpack(ids)) or {}
  for j in ipairs(ids) do spans[j] = tonumber(known[j] or spans[j] or 0) or 0 end
  return spans
end

-- After messages with chosen ids have ended, write their deduplication keys, which block the ids from being published
-- again. `at` has the index of each message in the script call. Ignore errors of Redis.
local function take(ids, at, spans)
  if #ids == 0 or #KEYS <= HEAD_KEYS + ITEMS then return end
  for j, ms in ipairs(known_spans(ids, spans)) do
    if ms > 0 then redis.pcall('SET', mark(at[j]), 'ended', 'PX', string.format('%.0f', math.min(ms, 1e15))) end
  end
  redis.pcall('HDEL', windows, unpack(ids))
end

-- When the due time of a message changes by `by_ms`, change the TTL of its body by the same time. If the due time in
-- the message's header has 13 digits, overwrite it with `due`.
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

-- Return the reply of an earlier script call with the same call number, so that a repeated call is not run twice.
-- Return nil for a new call number, and 'stale' if the lane (the client's sequence of calls) has had a later call. Also
-- return the text that Redis stores for the lane: the number and the reply of its last call.
local function recall()
  local kept = read('GET', lane)
  local last, answer = (kept or ''):match('^(%d+) (.*)$')
  if not last or tonumber(last) < tonumber(number) then return nil, kept end
  return last == number and answer or 'stale', kept
end
local function remember(answer, ttl_ms) redis.call('SET', lane, number .. ' ' .. answer, 'PX', ttl_ms) end

-- Check whether the i-th message may be published with its chosen id. Return nil if it may, or the reason why not, such
-- as `duplicate`. Return `revive` if it may be published, but a cancelled message with this id is still in a list.
local function standing(i, id)
  local ended = replace == '' and read('GET', mark(i))
  if ended and ended ~= 'freed' then return ended == 'ended' and 'duplicate' or 'tombstoned' end
  if read('SISMEMBER', garbage, id) == 1 then return 'duplicate' end
  if read('HEXISTS', retries_left, id) == 0 then return nil end
  local word = read('HGET', lease, id)
  local in_list = (word == '!' or word == 'purged!') and not read('ZSCORE', unack, id)
  return in_list and 'revive' or 'duplicate'
end

-- Return the version of a shard map from a stored text in the form `VERSION SHARDS SHARDS_BEFORE`. Return 0 if reliq
-- did not write this text.
local function epoch_of(text)
  local found = tonumber(text:match('^(%d+) %d+ %d+') or 0)
  return found <= 1000000000 and found or 0
end

-- Check whether this shard may publish messages from a publisher that has the version `known` of the shard map. Return
-- the text of the refusal if the shard is closed, or if `binds` is true and the shard has a newer shard map. Otherwise
-- return nil. Also return whether the publisher's shard map is newer, so that the shard must store its version. An
-- empty `known` is always allowed, because shard 0 is never closed. The version `never` is always refused.
local function fence(binds)
  if known == '' then return nil, false end
  local text = read('GET', epoch) or ''
  local least, mine = epoch_of(text), epoch_of(known)
  if mine > least then return nil, true end
  local refuses = known == 'never' or least > 0 and (text:find('closed') or (binds and mine < least))
  return refuses and 'epoch ' .. text or nil, false
end

-- Return the call number of the claim that leased a message, in the form LANE.NUMBER. `word` is the nonce of a receipt,
-- or the message's state word. Return nil for the state word of a message without a lease.
local function call_of(word) return word:match('([^~:]*):') end

-- Check the receipts (proofs of leases) in the arguments of the script. Return six values: all message ids; the indexes
-- of the valid receipts; the ids of cancelled messages; the ids with an invalid receipt; the state words of all
-- messages; and a table with the index of the valid receipt of each id. If `with_cancelled` has a value, the valid
-- receipts include those of cancelled messages. A receipt is valid if its id is in `unack` and the message's state word
-- has the same LANE.NUMBER as the receipt. The rest of the word may differ: a checkpoint removes `D~` from it.
--
-- A message with a successor must be ended by the script `succeed`. So other scripts treat its receipt as invalid, and
-- return its id inside its own list. `succeed` passes 'heir', and gets the ids of messages without a successor in this
-- way. With 'any', successors make no difference.
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

-- End messages that were cancelled while a worker had their leases.
local function stop(ids)
  run('ZREM', unack, ids)
  finish('cancelled', ids)
end
