"""Rule 4 for a user who may not do everything: what is read is read first, and no right is wanted that is not used."""

import pytest
import redis
from every_call import stage
from every_script import NAMES, SCRIPTS

from reliq.transitions import CallNumber, publish

#: `counts` writes nothing that could be left half done.
WRITERS = [name for name in NAMES if name != "counts"]
#: What is not in the script: a greeting, and how it is run.
HARMLESS = ("ping", "eval", "evalsha")


@pytest.fixture
def calls(run, client, keys):
    return stage(run, client, keys)


@pytest.fixture
def as_user(url, client):
    """Make a call as a user with these rules."""

    def make(call, *rules):
        client.execute_command("ACL", "SETUSER", "limited", "reset", "on", "nopass", "allkeys", *rules)
        with redis.Redis.from_url(url, username="limited", password="any") as limited:
            return limited.execute_command(*call.command_in_full)

    yield make
    client.acl_deluser("limited")


@pytest.mark.parametrize("command", ["GET", "SISMEMBER", "HEXISTS", "HLEN", "LLEN"])
def test_a_read_that_is_refused_is_named_and_nothing_is_changed(command, keys, as_user, dump):
    chosen = publish(
        keys, [("mine", b"body")], CallNumber("lane", 1), ttl_ms=1000, retries=3, window_ms=1000, bare=True
    )
    before = dump()

    with pytest.raises(redis.exceptions.ResponseError, match=command):
        as_user(chosen, "+@all", f"-{command.lower()}")

    assert dump() == before


@pytest.mark.parametrize("name", WRITERS)
def test_a_user_who_has_the_commands_of_a_script_alone_can_run_it(name, calls, as_user):
    commands = {command for command, _ in SCRIPTS[name].uses}
    granted = [f"+{command.lower()}" for command in (*commands, *HARMLESS)]

    answer = as_user(calls[name], "-@all", *granted)

    assert repr(calls[name].read(answer))
