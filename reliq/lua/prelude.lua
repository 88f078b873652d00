-- What scripts share. The loader writes a script's KEYS and ARGV as locals from its header, then what the script
-- uses of this text, then a read of every key's type, then the script itself, which reads first, then adds, then
-- removes: a script that is cut off half-way delivers something twice, and loses nothing.
-- A message's place in the tails: `arg(i, NAME)` and `body(i)`; `mark(j)` is the j-th dedup key.

-- Now, in ms. Rounded up where it makes a due time or a deadline, down where it decides
-- whether one has passed: nothing is ever early.
local us = tonumber(clock)
if not us then
  local time = redis.call('TIME')
  us = time[1] * 1000000 + time[2]
end
local now_up, now_down = math.ceil(us / 1000), math.floor(us / 1000)

local function arg(i, field) return ARGV[HEAD_ARGS + (i - 1) * TAIL_ARGS + field] end
local function body(i) return KEYS[HEAD_KEYS + i] end
local function mark(j) return KEYS[HEAD_KEYS + ITEMS + j] end

-- Read a key; one of another type ends the script, by name, before it has written anything.
local function read(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  local why = type(answer) == 'table' and answer.err
  if why then
    local is_type = why:find('WRONGTYPE', 1, true)
    error(why .. (is_type and ' RELIQ_KEY ' .. key .. ' ' or ' (' .. command .. ' ' .. key .. ')'), 0)
  end
  return answer
end

local function score(ms) return string.format('%.3f', ms / 1000) end
local function ms_of(text) return math.floor(text * 1000 + 0.5) end

-- A count that is missing or no number is 0, as one below it is.
local function count(text) return text and text:match('^%d+$') and math.min(tonumber(text), 1000000) or 0 end
local function cancelled(word) return word and word:sub(-1) == '!' end

-- How many deliveries in a row a message has not survived: of a suspect that waits `suspect` (one), `suspect2` and
-- so on; of one that is held `2~NONCE`.
local function deaths(word)
  local waiting = word:match('^suspect(%d*)$')
  if waiting == '' then return 1 end
  return math.min(tonumber(waiting or word:match('^(%d+)~') or 0), 99)
end
local function suspect(died) return 'suspect' .. (died > 1 and string.format('%.0f', died) or '') end

-- Whether a message in unack is held by nobody: it waits there until it is delivered again.
local function waits(word) return word == 'nacked' or (word or ''):find('^suspect') end

-- Totals come last and never fail: an account off by one beats a message lost.
local function add(kind, n)
  if n > 0 then redis.pcall('HINCRBY', totals, kind, n) end
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

-- The first write of what drains: the removal that it ends with, of nothing. Redis refuses a script at `maxmemory`
-- its first write alone, so that all others pass; and who may not remove is refused before anything is added.
local function begin(zset) redis.call('ZREM', zset, 'no message is called so') end

-- Put ids into a sorted set, all at one time or each at its own; when that makes its head sooner, whoever watches
-- knows too late a time: the next claim watches instead.
local function put(zset, dues, ids)
  if #ids == 0 then return end
  local first, soonest, pairs_of = head(zset), nil, {}
  for i, id in ipairs(ids) do
    local due = type(dues) == 'table' and dues[i] or dues
    pairs_of[2 * i - 1], pairs_of[2 * i] = score(due), id
    soonest = math.min(soonest or due, due)
  end
  redis.call('ZADD', zset, unpack(pairs_of))
  if not first or soonest < first then
    redis.call('DEL', watch)
    push_token()
  end
end

local function forget(ids)
  if #ids == 0 then return end
  redis.call('HDEL', counts, unpack(ids))
  redis.call('HDEL', lease, unpack(ids))
  redis.call('HDEL', errors, unpack(ids))
end

-- How messages ended, the last `most` of them. As totals: late, and never in the way.
local function note_ends(stream, most, kind, ids, notes, letters)
  for i = math.max(1, #ids - most + 1), #ids do
    local letter = letters and letters[i] or ''
    redis.pcall('XADD', stream, '*', 'id', ids[i], 'kind', kind, 'note', notes[i] or '', 'letter', letter)
  end
  if #ids > 0 then redis.pcall('XTRIM', stream, 'MAXLEN', most) end
end

-- End messages in any way but by an ack; what last went wrong with them is kept with their end.
local function finish(kind, ids)
  if #ids == 0 then return end
  local notes = redis.call('HMGET', errors, unpack(ids))
  forget(ids)
  add(kind, #ids)
  note_ends(ends, 1000, kind, ids, notes)
end

-- Chosen ids that end, the `at[j]`-th messages of the tail: each stays taken for as long as its publish said, or else
-- for `spans[j]`. That it cannot be noted stops nothing.
local function take(ids, at, spans)
  if #ids == 0 or #KEYS <= HEAD_KEYS + ITEMS then return end
  local known = redis.pcall('HMGET', windows, unpack(ids))
  for j in ipairs(ids) do
    local i, ms = at[j], tonumber(known[j] or spans[j] or 0) or 0
    if ms > 0 then redis.pcall('SET', mark(i), 'ended', 'PX', string.format('%.0f', math.min(ms, 1e15))) end
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

-- A lane's answer to this call number (nil when it is new, 'stale' when a later one ran), and whether the lane is known.
local function recall()
  local kept = read('GET', lane)
  local last, answer = (kept or ''):match('^(%d+) (.*)$')
  if not last or tonumber(last) < tonumber(number) then return nil, kept end
  return last == number and answer or 'stale', kept
end

local function remember(answer, ttl_ms)
  redis.call('SET', lane, number .. ' ' .. answer, 'PX', ttl_ms)
end

-- Which receipts in the tail still hold (index -> state word), and the indexes that do not.
-- A receipt is the nonce in `lease`, a place in unack and the retries left as claimed.
local function receipts()
  local ids, held, lost, seen = {}, {}, {}, {}
  if ITEMS == 0 then return ids, held, lost end
  for i = 1, ITEMS do ids[i] = arg(i, ID) end
  local words, lefts = redis.call('HMGET', lease, unpack(ids)), redis.call('HMGET', counts, unpack(ids))
  local places = redis.call('ZMSCORE', unack, unpack(ids))
  for i, id in ipairs(ids) do
    local nonce, word = arg(i, NONCE), words[i]
    local same = word == nonce or word == nonce .. '!'
    local unspent = not lefts[i] or count(lefts[i]) == tonumber(arg(i, LEFT))
    if same and unspent and places[i] and not seen[id] then
      held[i], seen[id] = word, true
    else
      lost[#lost + 1] = i
    end
  end
  return ids, held, lost
end
