-- book: book starts of messages under a limit that several queues share, or give back unused starts
--
-- KEYS  shared
-- ARGV  clock starts cost after rate burst buckets queue backlog
-- Runs  shared:HDEL,HGET,HMGET,HSET
-- Returns  after a booking: the us until the booked start, how many messages may start, the time of this start in unix
--          us, and for how many us this process must not book again. If nothing could be booked: the us until the next
--          try, then zeros. After a declaration: zeros, then the rate and burst that it replaced, as text.
-- Nothing to do: a script call with 0 starts and no cost only declares the rate and burst of the limit. The last
--          declaration applies to all processes.
--
-- A limit has a token bucket for starts, a token bucket for costs, or both. The argument `buckets` has two numbers for
-- each of the two token buckets: in how many ns it gains one unit, and its burst. Both numbers are 0 if the limit does
-- not have the token bucket. The hash `shared` stores the declared `buckets`. Its fields `full` and `cost_full` store
-- when each token bucket will be full again, and its field `ahead` stores the time of the latest booked start. A booked
-- start is at least `after` us from now. In any period, the starts and costs are at most the burst plus the rate times
-- the period.
--
-- Without a cost, the script books the starts that are possible immediately, or one start in the next 5 s. With a cost,
-- it books all `starts` together. The token bucket must begin to gain this cost in the next 5 s, so the booked start
-- may be more than 5 s away. Otherwise messages with small costs would always overtake a message with a large cost.
--
-- If `starts` and `cost` are negative, the script gives back an unused booking. `after` is then the time of the booked
-- start. The script gives back less if a token bucket has gained tokens since that start, or will gain them until the
-- latest booked start: the token bucket may have been full all this time, and would then exceed its burst. If `starts`
-- is 0, the script corrects the cost of a booking: `cost` is the real cost minus the booked cost.
--
-- For each queue, a field of the hash `shared` stores the queue's booked starts. The argument `queue` is the name of
-- this field. If the booked starts are enough for the `backlog` of the queue, the script books nothing, so that several
-- processes do not book starts for the same message.
--
-- If a process does not get the reply, it may repeat the script call. The limit then counts both bookings, and fewer
-- messages start than the limit allows.

starts, cost, after = tonumber(starts), tonumber(cost), tonumber(after)
local at, most = us + after, us + 5000000
local found = read('HMGET', shared, 'buckets', 'full', 'cost_full', 'turn', 'ahead', 'rate', 'burst')
local function read_buckets(text)
  local n = { (text or ''):match('^(%d+) (%d+) (%d+) (%d+)$') }
  if #n == 0 then return nil end
  local both = { { field = 'full', every = n[1] / 1000, burst = n[2] + 0, units = starts },
    { field = 'cost_full', every = n[3] / 1000, burst = n[4] + 0, units = cost } }
  -- After a booking, a token bucket is full again at `latest` or earlier. If a stored time is later, Redis' clock was
  -- set back.
  local latest = most + both[1].every * n[2] + 2 * both[2].every * n[4]
  for i, one in ipairs(both) do
    one.whole = one.every * one.burst
    one.full = one.every > 0 and math.min(math.max(tonumber(found[i + 1] or '') or 0, us), latest) or us
  end
  return both
end
local known = read_buckets(found[1])
local is_other = known and found[1] ~= buckets
-- The queues of the limit must run even if Redis is full (`maxmemory`). Redis then checks only the first write of a
-- script, and always allows a removal. So begin the writes with a removal.
redis.call('HDEL', shared, 'no field is called so')
if not known or (is_other and starts == 0 and cost == 0) then
  redis.call('HSET', shared, 'buckets', buckets, 'rate', rate, 'burst', burst)
  known = read_buckets(buckets)
end
if starts == 0 and cost == 0 then
  return { 0, 0, 0, 0, is_other and string.format('rate=%s, burst=%s', found[6] or '', found[7] or '') or '' }
end
local function store(...)
  for _, one in ipairs(known) do redis.call('HSET', shared, one.field, string.format('%.0f', one.full), ...) end
end

local ahead, booked = tonumber(found[5] or '') or 0, redis.call('HGET', shared, queue) or ''
if starts <= 0 then
  redis.call('HSET', shared, queue, (booked:gsub(string.format('%.0f:%.0f ?', after, -starts), '')))
  for _, one in ipairs(known) do
    local change = one.every * one.units
    if change < 0 then change = after <= most + one.whole and math.min(0, change + math.max(0, math.max(us, ahead) - after)) or 0 end
    one.full = one.full + change
  end
  store()
  return { 0, 0, 0, 0, '' }
end

local others, last, kept = 0, 0, ''
for due, number in booked:gmatch('(%d+):(%d+)') do
  if tonumber(due) > us - 20000 and tonumber(due) <= most then others, last, kept = others + number, due, kept .. due .. ':' .. number .. ' ' end
end
starts = math.min(starts, backlog - others)
if starts <= 0 then return { math.ceil(last - us + 30000), 0, 0, 0, '' } end
local of_starts, of_costs = unpack(known)
if cost == 0 and of_starts.every > 0 then
  starts = math.max(1, math.min(starts, math.floor(of_starts.burst - (of_starts.full - at) / of_starts.every + 1e-6), of_starts.burst))
end
of_starts.units = starts
-- `far` is the time of the possible start or, with a cost, the time when the token bucket begins to gain this cost. The
-- script books only if `far` is at most 5 s away. `step` is the time in which the token buckets gain one start and the
-- cost.
local far = cost == 0 and at or 0
for _, one in ipairs(known) do
  -- If the starts or the cost are above the burst, because another process has declared a lower burst, wait until the
  -- token bucket is full.
  local whole_or_less = math.min(one.units * one.every, one.whole)
  local first = one.full + whole_or_less - one.whole
  at, far = math.max(at, first), math.max(far, one == of_costs and first - whole_or_less or first)
end
-- If the limit allows no start in the next 5 s, the process must try again later. Each process gets its own time for
-- this, one `step` after the time of the previous process, so that the limit then allows a start. `turn` is the time
-- for the next process. If a process books a start more than 2.5 s away, it must not book again until the waiting
-- processes have tried again. `turn` is at most 30 s after `far`, because a waiting process may be dead.
local turn, next_try, step = math.min(tonumber(found[4] or '') or 0, far + 30000000), 0, math.max(of_starts.every, of_costs.every * cost)
if far > most then
  turn = math.max(turn, us + far - most)
  -- Also store the token buckets, because their times may have been reduced to `latest` after Redis' clock was set
  -- back. Without this write, each later try would reduce them again.
  store('turn', string.format('%.0f', turn + step))
  return { math.ceil(turn - us), 0, 0, 0, '' }
elseif turn > us and far - us > 2500000 then
  turn = math.max(turn, far)
  next_try = math.ceil(turn - us)
  redis.call('HSET', shared, 'turn', string.format('%.0f', turn + step))
end
for _, one in ipairs(known) do one.full = math.max(one.full, at) + one.units * one.every end
store('ahead', string.format('%.0f', math.max(ahead, at)), queue, string.format('%s%.0f:%.0f', kept, math.ceil(at), starts))
return { math.ceil(at - us), starts, math.ceil(at), next_try, '' }
