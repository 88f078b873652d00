"""The examples are whole programs: they run, tell their story, and their account balances."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from ports import free_port
from waiting import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCOUNT = re.compile(
    r"Account of \S+: (\d+) published = (\d+) acked, (\d+) cancelled, (\d+) expired, (\d+) dead, (\d+) alive; (\d+) missing\."
)


@pytest.fixture
def run(url):
    """Run an example, on the server under test or on one of its own, and return what it printed and its account."""

    def make(name, *arguments, own_server=False, at=url, change=""):
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "error"}
        environment.pop("RELIQ_URL", None)
        if not own_server:
            environment["RELIQ_URL"] = at
        changed = f"import {Path(name).stem} as example; {change}; example.main()"
        done = subprocess.run(
            [sys.executable, *(["-c", changed] if change else [str(EXAMPLES / name)]), *arguments],
            cwd=EXAMPLES,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        account = ACCOUNT.search(done.stdout)
        assert account, done.stdout
        return done.stdout, tuple(int(number) for number in account.groups())

    return make


def test_unpaid_orders_are_closed_and_paid_ones_are_not(run):
    told, account = run("order_timeout.py", "0.3")

    assert account == (6, 4, 2, 0, 0, 0, 0)
    assert "after a minute `reliq forget order-deadlines --letters` removes it" in told
    assert "In the end: 101 closed, 102 paid, 103 closed, 104 closed, 105 paid, 106 closed" in told
    assert sorted(re.findall(r"Order (\d+) is closed", told)) == ["101", "103", "104", "106"]


@pytest.fixture
def sentinel_url(redis_server, server_path, tmp_path):
    """The server under test as a Sentinel calls it."""
    port, settings = free_port(), tmp_path / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor shop 127.0.0.1 {redis_server.port} 1\n")
    command = [server_path, settings, "--sentinel"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with redis.Redis(port=port) as client:
        eventually(lambda: answers(client), "the Sentinel knows the server")
    yield f"redis+sentinel://127.0.0.1:{port}/shop/0"
    process.kill()
    process.wait()


def answers(client):
    try:
        return client.sentinel_master("shop")["flags"] == "master"
    except redis.RedisError:
        return False


@pytest.mark.parametrize("where", ["a Sentinel", "a Cluster"])
def test_the_url_alone_says_that_redis_is_behind(where, run, request):
    at = request.getfixturevalue("sentinel_url") if where == "a Sentinel" else request.getfixturevalue("cluster").url

    told, account = run("order_timeout.py", "0.3", at=at)

    assert account == (6, 4, 2, 0, 0, 0, 0)
    assert "In the end: 101 closed, 102 paid, 103 closed, 104 closed, 105 paid, 106 closed" in told


def test_webhooks_are_delivered_tried_again_or_buried_with_a_reason(run):
    told, account = run("webhooks.py", change="example.ANSWER_SECONDS = 2.0")  # who is only slow does not hang

    assert account == (5, 3, 0, 0, 2, 0, 0)
    for line in (
        "to-well: delivered at attempt 1 (HTTP 200)",
        "to-recovers: delivered at attempt 3 (HTTP 200)",
        "to-hangs: delivered at attempt 3 (HTTP 200)",
        "to-moved-away: dead letter after 1 attempts, rejected: the receiver refuses it: HTTP 410",
        "to-broken: dead letter after 5 attempts, failed: HTTPError: HTTP Error 500: Internal Server Error",
    ):
        assert line in told


def test_thumbnails_are_made_by_worker_processes(run):
    told, account = run("thumbnails.py", "12")

    assert account == (12, 12, 0, 0, 0, 0, 0)
    assert "12 of 12 pictures are 24 x 18 now." in told
    assert len(set(re.findall(r"(\d+)\.small\.ppm by process \d+", told))) == 12


def test_an_example_brings_its_own_server_when_none_is_named(run):
    _, account = run("order_timeout.py", "0.1", own_server=True)

    assert account == (6, 4, 2, 0, 0, 0, 0)


def test_a_newsletter_of_one_tenant_does_not_hold_up_the_mail_of_others(run):
    told, account = run("tenants.py")

    assert account == (66, 66, 0, 0, 0, 0, 0)
    assert int(re.search(r"quiet tenant went out as number (\d+) of 66", told)[1]) <= 30
    assert int(re.search(r"At most (\d+) of one tenant", told)[1]) <= 2
