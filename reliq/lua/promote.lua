-- promote: pending -> ready
--
-- KEYS  pending ready totals wake
-- ARGV  clock limit
-- Runs  pending:ZRANGE,ZRANGEBYSCORE,ZREM ready:LPUSH totals:HINCRBY wake:LLEN,LPUSH
-- Keyed  ready:EXISTS retry:EXISTS retries_left:HMGET limits:HDEL,HGET,HMGET,HSET ring:EXISTS,ZADD,ZRANGE
--       held:ZCARD,ZLEXCOUNT,ZREM,ZSCAN,ZSCORE asleep:ZADD,ZMSCORE,ZRANGE,ZRANGEBYSCORE,ZREM,ZSCAN,ZSCORE
--       rates:ZADD,ZRANGEBYSCORE,ZREM,ZSCORE line:EXISTS,LPUSH,RPUSH
-- Returns  how many moved, and the ms until the next is due (-1: none)
-- Nothing to do: 0 and that wait.

local ids = redis.call('ZRANGEBYSCORE', pending, '-inf', score(now_down), 'LIMIT', 0, limit)

begin(pending)
if run('LPUSH', ready, ids) then push_token() end
run('ZREM', pending, ids)
add('promoted', #ids)
return { #ids, wait_for(pending) }
