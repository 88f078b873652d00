"""Wrong usage exits with code 2 and one line with the fix; an unreachable Redis exits with code 1 and one line."""

import pytest
from ports import free_port

#: Valid calls of commands that need an existing queue.
ON_A_QUEUE = (
    *(
        "workers QUEUE --running",
        "queues QUEUE --check",
        "show QUEUE x",
        "list QUEUE",
        "cancel QUEUE id",
        "pause QUEUE",
    ),
    *("cancel QUEUE --state ready --yes", "purge QUEUE --state ready --yes", "move QUEUE other --state ready --yes"),
    *(
        "list QUEUE --state dead",
        "redrive QUEUE --all --yes",
        "purge QUEUE --state dead --yes",
    ),
    *("resume QUEUE", "delete QUEUE --yes", "watch QUEUE", "queues QUEUE"),
)

#: One invalid value of each option and argument, and each invalid combination; tests/unit has more invalid values.
WRONG = {
    "queues a{b} --check": "queue name must be 1 to 128",
    "watch --interval soon": "a duration is written 30s",
    "watch --interval 10ms": "interval must be",
    "watch a,b": "queue name must be 1 to 128",
    "list q --kind lost": "kind must be one of",
    "list q --limit 0": "limit must be 1 to 10000, not 0",
    "list q --offset -1": "offset must be 0 to",
    "list q --header tenant": "a header is written NAME=VALUE",
    "list order:timeout": "may have this name: --layout hdt3213",
    "check orders --layout go": "layout must be",
    "worker jobs:consumer --burst=never": "does not take a value",
    "publish q": "give BODY",
    "publish q {": "the body is not JSON",
    "publish q {} --id a{b": "id must be 1 to 128 of",
    "publish q {} --delay soon": "a duration is written 30s",
    "publish q {} --at 2026-11-21T03:00": "with its offset from UTC",
    "publish q {} --delay x --at y": "a duration is written 30s",
    "publish q {} --delay 1h --at 2026-11-21T03:00Z": "delay or at, not both",
    "publish q {} --dedup 1h": "--dedup needs your own message id",
    "publish q {} --retries -1": "retries must be 0 to",
    "publish q {} --header a{b=c": "a header's name must be",
    "publish q --jsonl /nowhere/lines": "cannot read /nowhere/lines: No such file",
    "publish q {} --jsonl FILE": "leave out BODY and --id",
    "publish q --jsonl FILE --on-error cry": "--on-error must be one of stop, skip",
    "publish a:b {}": "queue name must be 1 to 128",
    "publish q {} --key a --priority high": "give key or priority, not both",
    "publish q {} --priority urgent": "priority must be one of high, normal, low, not 'urgent'",
    "cancel q": "name the messages",
    "cancel q a{b": "id must be 1 to 128 of",
    "cancel q id --state ready": "name the messages",
    "cancel q id --match x": "need --state instead of ids",
    "cancel q --state dead": "state must be one of pending, ready, waiting, retry, unack",
    "purge q --state lost": "state must be one of pending, ready",
    "purge q --state ready": "add --yes",
    "move q other --state lost": "state must be one of",
    "move q other --state dead": "reliq redrive q --to other",
    "move q q --state ready --yes": "cannot go to 'q' itself; name another queue",
    "move q nobodys --state ready --yes": "messages go only to a queue that was used before",
    "list q --state dead --reason bored": "reason must be one of failed, rejected",
    "list q --state dead --older-than old": "a duration is written 30s",
    "list q --limit 10001": "limit must be 1 to",
    "redrive q": "give either --all or a filter",
    "redrive q --all": "add --yes",
    "redrive q --all --error x": "give either --all or a filter",
    "redrive q --all --yes --rate fast": "rate must be a number of messages",
    "redrive q --all --yes --retries -1": "retries must be 0 to 1000",
    "redrive q --all --yes --limit 0": "limit must be 1 to",
    "redrive q --all --yes --delay 9999d": "delay must be 0 to",
    "redrive q --all --yes --to q": "cannot go to 'q' itself; name another queue",
    "redrive q --all --yes --to x": "there is no queue 'x' here",
    "list q --reason failed": "cannot have 'reason'",
    "list q --state ready --group": "--group works only for dead letters",
    "purge q --state ready --error x --yes": "cannot have 'error'",
    "purge q --state ended --yes": "state must be one of",
    "pause q --for while": "a duration is written 30s",
    "pause q --for 0s": "for_ must be 0.001 to ",
    "pause q --key a --reason x": "leave --reason or --key out",
    "delete q": "add --yes",
    "pause q --key a --cron b": "only one of --key, --cron and --schedule",
    "pause q --cron b --for 1h": "leave --for out",
    "workers q --stacks": "need --running",
    "limits q --rate fast": "rate must be a number",
    "limits q --weight vip": "write a weight as KEY=N",
    "limits q --clear everything": "clear must be some of",
    "keys q --all --key a": "--all",
    "shards q 3 --yes": "power of two from 1 to 256, not 3",
    "acl --role boss --queue q": "a role must be one of",
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_usage_is_one_line_with_exit_code_2_and_changes_nothing(call, command, queue, tmp_path):
    queue.publish({}, id="there")
    file = tmp_path / "lines"
    file.write_text("{}\n")

    done = command(*(str(file) if word == "FILE" else word for word in call.split()))

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    assert done.err.startswith("reliq: ")
    assert WRONG[call] in done.err
    assert (queue.counts().ready, queue.counts().paused) == (1, False)


def test_command_on_an_unknown_queue_refuses_it_and_creates_nothing(command, client):
    for call in ON_A_QUEUE:
        done = command(*call.replace("QUEUE", "oders").split())

        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
        assert done.err.startswith("reliq: there is no queue 'oders' here; `reliq queues --scan` lists")
        assert client.keys("*") == []


def test_command_without_redis_or_a_url_prints_one_line(command, monkeypatch):
    monkeypatch.setattr("reliq.redis.session.PATIENCE_SECONDS", 0.01)

    for call in ("queues", "workers", "queues q --check", "list q", "redrive q --all --yes", "doctor"):
        done = command(*call.split(), "--url", f"redis://127.0.0.1:{free_port()}/0")

        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), call
        assert done.err.startswith("reliq: ")
        assert "Connection refused" in done.err
    monkeypatch.delenv("RELIQ_URL")
    unnamed = command("list", "q")
    assert (unnamed.code, "RELIQ_URL" in unnamed.err) == (2, True)
