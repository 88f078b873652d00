-- As in a queue without keys, but the lists take turns, ready and retry as one of them, beginning with `first`; a line
-- stops at a message that must wait. At most `spread` keys have a turn, and `keyed_limit` messages start. Nothing starts
-- above the limits; the times at which they permit more count as due times of pending: who makes them sooner watches for
-- them, whoever watched before.

read('LLEN', ready)
read('LLEN', retry)
read('HLEN', retries_left)
read('HLEN', lease)
limit, direct, spread = tonumber(keyed_limit), tonumber(direct), tonumber(spread)
local claimed, line_of, taken, deadlines, words, places, deadline = {}, {}, { 0 }, {}, {}, {}, score(now_up + lease_ms)
taken[2] = line_of
local dropped, moved, dues, misplaced = {}, {}, {}, {}

local function keep(id, left, died, key)
  local n = #claimed + 1
  claimed[n], line_of[n], key_of[id] = id, key, key
  pair(deadlines, deadline, id)
  pair(words, id, word_of(died))
  pair(places, 0, place(key, id))
  taken[3 * n], taken[3 * n + 1], taken[3 * n + 2] = id, left, died
end

-- Decide on a message: it starts, waits where it is, or has no business there.
local function meet(row, id, word, text)
  local left, died, due = count(text), word and deaths(word) or 0, word and word:match('^@(%d+)')
  local is_direct, key = died > 0 or left == 0, text and key_in(text) or row.key
  if cancelled(word) then
    dropped[#dropped + 1] = read('HLEN', errors) and id
  elseif due then
    moved[#moved + 1], dues[#dues + 1] = id, due
  elseif key ~= row.key then
    misplaced[#misplaced + 1], key_of[id] = id, key
  elseif (is_direct and direct == 0) or not may_run(died, left) then
    if key == '' then row.back[#row.back + 1] = id else row.stops = true end
  else
    direct = direct - (is_direct and 1 or 0)
    keep(id, left, died, key)
    return true
  end
end

local again, known
if limit > 0 then again, known = recall() end
if again == 'stale' then return { -2, -2, 0, 0, {} } end
local before = again and again ~= '' and cmsgpack.unpack(again) or taken
for i = 3, #before, 3 do
  local id, died = before[i], before[i + 2]
  if read('HGET', lease, id) == word_of(died) and redis.call('ZSCORE', unack, id) then
    keep(id, count(read('HGET', retries_left, id)), died, before[2] and before[2][i / 3] or '')
  end
end
local room, full = queue_room()
local rows = serve((again or redis.call('EXISTS', paused) == 1) and 0 or math.min(limit, room), meet)

begin(unack)
taken[1] = again and before[1] or #claimed > 0 and new_token() or 0
if known then redis.call('DEL', lane) end
local is_sooner, is_limited = spend(rows, full, again and 0 or #claimed)
run('ZADD', held, places)
run('ZADD', unack, deadlines)
run('HSET', lease, words)
if #claimed > 0 or known then remember(#claimed > 0 and cmsgpack.pack(taken) or '', lease_ms) end
put(pending, dues, moved)
line_up(misplaced)
leave_rows(rows, misplaced)
run('HDEL', lease, moved)
finish('cancelled', dropped)

if is_sooner then redis.call('DEL', watch) end
local promote_in, reclaim_in = watch_for(pending, unack)
local behind = waiting_now()
if behind > 0 and #claimed + #dropped + #moved + #misplaced > 0 then push_token() end
if #claimed == 0 and redis.call('LLEN', wake) > 1 then redis.call('LTRIM', wake, 0, 0) end
if not again then add('claimed', #claimed) add('limited', is_limited and limit > 0 and 1 or 0) end
return { until_more(promote_in), reclaim_in, behind, unpack(taken) }
