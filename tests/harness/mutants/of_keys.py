"""The mutants of queues with keys: one for each move's key handling, and for each rule of taking turns."""

from tests.harness.mutants.mutant import KEYED, Mutant

PRELUDE, CLAIM, PROMOTE = "lua/keyed/prelude.lua", "lua/claim.lua", "lua/promote.lua"
#: Name, file, text and its replacement.
_ROWS = (
    (
        "a key has more places than its limit",
        PRELUDE,
        "math.min(places_free(row.key), row.may)",
        "row.may",
    ),
    ("a lease without a place", CLAIM, "-- keyed: run('ZADD', held, places)\n", ""),
    (
        "a message revived under another key runs under the old one",
        CLAIM,
        "elseif key ~= row.key then",
        "elseif false then",
    ),
    (
        "a revived message keeps its old place",
        "lua/publish.lua",
        "if reasons[i] == 'revive' then old",
        "if false then old",
    ),
    ("a revived message is in two places", PRELUDE, "    redis.call('LREM', from[1], -1, id)\n", ""),
    (
        "a key that a revived message leaves keeps its turn",
        PRELUDE,
        "redis.call('ZREM', ring, from[2])",
        "redis.call('ZREM', ring, '')",
    ),
    ("messages of one due time start in the order of their ids", PRELUDE, "last[key] and last[key] + 1 or first", "0"),
    (
        "an ordered message gives its place up when it fails",
        PRELUDE,
        "if is_ordered and places_of(key_of[id] or '') then",
        "if false then",
    ),
    (
        "a message that failed comes behind its line",
        PRELUDE,
        "run('RPUSH', line .. key, reversed(some[key]))",
        "run('LPUSH', line .. key, reversed(some[key]))",
    ),
    ("a snoozed message in order comes behind its line", PRELUDE, "is_kept and kept or fresh", "fresh"),
    (
        "an acked message keeps its place",
        "lua/ack.lua",
        "free_places(done) free_places(stopped)",
        "free_places(stopped)",
    ),
    ("a buried message keeps its place", "lua/nack.lua", "free_places(buried) stand_by", "stand_by"),
    ("a cancelled message keeps its place", "lua/cancel.lua", "free_places(gone)\n", ""),
    ("a released message keeps its place", "lua/release.lua", "-- keyed: free_places(freed)\n", ""),
    ("a reclaimed message keeps its place", "lua/reclaim.lua", "free_places(back) ", ""),
    ("what died twice in order gives its place up", "lua/reclaim.lua", "stand_by(held_back)", "free_places(held_back)"),
    ("a redelivery loses the key", "lua/reclaim.lua", "counted(left - 1, lines[id])", "left - 1"),
    (
        "a redriven message loses its key",
        "lua/redrive.lua",
        "counted(arg(i, RETRIES), line_of_value(fields.value))",
        "arg(i, RETRIES)",
    ),
    ("a key that gets its first message has no turn", PRELUDE, "== #some[key] then woken", "== 0 then woken"),
    ("a key that has no place free has a turn", PRELUDE, " and places_free(key) > 0 then", " then"),
    (
        "a key without a line keeps its turn",
        PRELUDE,
        "local is_read = row.at == #row.ids",
        "local is_read = false",
    ),
    (
        "a key that is purged keeps its turn",
        "lua/purge.lua",
        "redis.call('ZREM', ring, key)",
        "redis.call('ZREM', ring, '')",
    ),
    ("a key that sleeps has a turn", PRELUDE, "if not sleeps[i] and redis", "if redis"),
    ("a key that slept is not served again", PROMOTE, "-- keyed: ring_in(awake)\n", ""),
    (
        "a start does not count for the rate of its key",
        PRELUDE,
        "row.full + row.started * rate_of(row.key)",
        "row.full",
    ),
    ("a start does not count for the rate of the queue", PRELUDE, "full + n * rate_of('')", "full"),
    ("a bucket is wider by one", PRELUDE, "math.floor(burst - (full - us)", "math.floor(burst + 1 - (full - us)"),
    ("a clock that goes back shuts a bucket", PRELUDE, "us), us + every * burst)", "us), math.huge)"),
    ("a clock that goes back leaves a key asleep", PRELUDE, "if is_throttled(late[k + 1]) then", "if false then"),
    ("nobody waits for the rate of the queue", PRELUDE, "if may == 0 then due", "if false then due"),
    (
        "what keeps its place while it waits counts as running",
        PRELUDE,
        "redis.call('ZCARD', held) - 2 * in_flight('\\2')",
        "redis.call('ZCARD', held)",
    ),
    ("the concurrency of a queue is no limit", PRELUDE, "concurrency - running()", "concurrency"),
    ("a higher limit wakes nobody", "lua/limit.lua", "walk_on()\n", ""),
    (
        "a place that is free wakes nobody",
        PRELUDE,
        "limits_now().concurrency and redis.call('EXISTS', ring, ready, retry) > 0 then offer() end",
        "false then offer() end",
    ),
)
MUTANTS_OF_KEYS = tuple(Mutant(*row, by=KEYED) for row in _ROWS)
