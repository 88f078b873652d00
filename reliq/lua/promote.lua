-- promote: move due messages from pending to ready, or to their key queues
--
-- KEYS  pending ready totals wake
-- ARGV  clock limit
-- Runs  pending:ZRANGE,ZRANGEBYSCORE,ZREM ready:LPUSH totals:HINCRBY wake:LLEN,LPUSH
-- Keyed  ready:EXISTS retry:EXISTS retries_left:HMGET limits:HDEL,HGET,HMGET,HSET ring:EXISTS,ZADD,ZRANGE
--       held:ZCARD,ZLEXCOUNT,ZREM,ZSCAN,ZSCORE asleep:ZADD,ZMSCORE,ZRANGE,ZRANGEBYSCORE,ZREM,ZSCAN,ZSCORE
--       rates:ZADD,ZSCORE line:EXISTS,LPUSH,RPUSH
-- Returns  how many messages moved, and the ms until the next message is due (-1: there is none).
-- Nothing to do: if no message is due, returns 0 and the ms until the next message is due.
--
-- In a queue with keys, a message with a key moves to its key queue. The script also lets messages of a key start again
-- if the throttling of the key has ended. It then returns the ms until a message is due, a throttling ends, or the
-- queue's rate limit allows a start, whichever is first. In `pending`, messages of a key with the same due time have
-- scores up to half a ms after this time, which keep their order.

local last = score(now_down)
-- keyed: last = last .. '5'
local ids = redis.call('ZRANGEBYSCORE', pending, '-inf', last, 'LIMIT', 0, limit)
local fresh = ids
-- keyed: local kept, awake, throttled
-- keyed: fresh, kept = by_place(ids)
-- keyed: awake, throttled = keys_to_wake()
-- keyed: local may, full = bucket('')

begin(pending)
-- If Redis' clock was set back, the function `bucket` has reduced the times of token buckets. Store these times.
-- keyed: local buckets = may == 0 and { string.format('%.0f', full), '' } or {}
-- keyed: if purse() then purse_read.keep(buckets) end
-- keyed: run('ZADD', rates, buckets)
line_up(fresh)
-- keyed: come_back(kept)
run('ZREM', pending, ids)
-- keyed: free_places(kept)
-- keyed: run('ZREM', asleep, awake)
-- keyed: ring_in(awake)
-- keyed: review(throttled)
-- keyed: walk_on()
add('promoted', #ids)
-- keyed: if redis.call('EXISTS', ready, retry, ring) > 0 then offer() end
local wait = wait_for(pending)
-- keyed: wait = until_more(wait)
return { #ids, wait }
