"""Cut off or record scripts, and restore a queue to an earlier state."""

import re

import redis

#: Commands that only read.
ONLY_READ = frozenset(
    {
        *("EXISTS", "GET", "GETRANGE", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HRANDFIELD", "HSCAN"),
        *("LINDEX", "LLEN", "LPOS", "LRANGE", "MGET", "PTTL", "SCARD", "SISMEMBER", "SMISMEMBER", "SRANDMEMBER"),
        *("SSCAN", "STRLEN", "TTL", "TYPE", "XLEN", "XRANGE", "XREVRANGE", "ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE"),
        *("ZRANDMEMBER", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE", "ZSCAN", "ZSCORE"),
    }
)

#: Prepended to a script: allows `after` writes, and ends the script at the next write, also inside `pcall`.
CUTTING = """\
local written, only_read = 0, {{ TIME = true, {only_read} }}
local function cutting(call)
  return function(command, ...)
    if not only_read[command] then
      if written == {after} then error('CUT', 0) end
      written = written + 1
    end
    return call(command, ...)
  end
end
local cut_call, cut_pcall = cutting(redis.call), cutting(redis.pcall)
"""


#: Wrapped around a script: returns the commands that it ran, each with its first key.
LISTENING = """\
local ran = {{}}
local function listening(call)
  return function(command, ...)
    ran[#ran + 1] = command .. ' ' .. (select('#', ...) > 0 and select(1, ...) or '')
    return call(command, ...)
  end
end
local heard_call, heard_pcall = listening(redis.call), listening(redis.pcall)
local function work()
{text}end
pcall(work)
return ran
"""


def run_by(client, call):
    """Run a call; return each command that its script ran, with the name of its key."""
    _, text, count, *rest = call.command_in_full
    text = LISTENING.format(text=re.sub(r"\bredis\.(p?call)\(", r"heard_\1(", text))
    ran = [one.decode().partition(" ") for one in client.execute_command("EVAL", text, count, *rest)]
    one = call.script
    brings_keys = "keyed" not in one.args or call.args[one.args.index("keyed")] == "1"
    width = len(one.tail_args) - (not brings_keys)
    items = (len(call.args) - len(one.args)) // width if width else len(call.keys) - len(one.keys)
    names = dict(zip(call.keys, (*one.keys, *(name for name in one.tail_keys for _ in range(items))), strict=False))
    starts = {key: name for key, name in zip(call.keys, one.keys, strict=False) if name in ("line", "msg", "result")}

    def name_of(key):
        return next((name for start, name in starts.items() if key.startswith(start)), None) or names[key]

    return {(command, name_of(key) if key else "") for command, _, key in ran}


def cut_after(client, call, writes):
    """Run a call whose script ends after `writes` writes; return whether it was cut off before its end."""
    only_read = ", ".join(f"{command} = true" for command in sorted(ONLY_READ))
    cutting = CUTTING.format(only_read=only_read, after=writes)
    name, _, *rest = call.command_in_full
    try:
        client.execute_command(name, cutting + re.sub(r"\bredis\.(p?call)\(", r"cut_\1(", call.script.text), *rest)
    except redis.ResponseError as error:
        assert "CUT" in str(error), error
        return True
    return False


class Snapshot:
    """The content of Redis, which can be restored."""

    def __init__(self, client):
        self._client, names = client, sorted(client.keys("*"))
        with client.pipeline() as pipe:
            for name in names:
                pipe.dump(name).pttl(name)
            answers = pipe.execute()
        self._keys = list(zip(names, answers[::2], answers[1::2], strict=True))

    def put_back(self):
        with self._client.pipeline() as pipe:
            pipe.flushdb()
            for name, value, left_ms in self._keys:
                pipe.restore(name, max(0, left_ms), value)
            pipe.execute()
