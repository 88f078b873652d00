"""If Redis refuses the login, a starting worker exits with one line, and a running worker retries with few lines."""

from collections import Counter

import pytest
import redis
from tenacity import wait_fixed
from waiting import eventually
from worker_process import Worker, environment_for

from reliq import Consumer, LoginError, Queue
from reliq.events import Acked, RedisRefused

JOBS = """
from reliq import Consumer
consumer = Consumer()
@consumer.handler("q")
def handle(body): ...
"""


def test_a_consumer_that_may_not_use_its_database_does_not_start(url):
    consumer = Consumer(url.replace("/0", "/9999"))
    consumer.handler("q")(lambda body: None)

    with pytest.raises(LoginError):
        consumer.start()


def test_a_worker_that_may_not_log_in_ends_with_78_and_one_line(url, tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    environment = environment_for(tmp_path, url.replace("redis://", "redis://nobody:wrong@"))
    worker = Worker("jobs:consumer", tmp_path, environment, "--log-format", "json")
    try:
        assert worker.wait() == 78
    finally:
        worker.close()

    assert len(worker.lines) == 1, worker.lines
    assert "Redis refused this user, password or database" in worker.lines[0]
    assert "wrong@" not in worker.lines[0]


def test_worker_whose_password_is_rotated_logs_few_of_many_refused_logins(own_server, recorder, caplog, monkeypatch):
    """Each part logs its 1st, 2nd, 4th, 8th ... failure, without a traceback."""
    monkeypatch.setattr("reliq.worker.loop.RECONNECT", wait_fixed(0.01))
    with redis.Redis.from_url(own_server.url) as admin:
        admin.execute_command("ACL SETUSER", "shop", "on", ">old", "~*", "&*", "+@all")
        consumer = Consumer(own_server.url.replace("://", "://shop:old@"), observers=[recorder])
        consumer.handler(Queue("q", str))(lambda body: None)
        consumer.start()
        admin.execute_command("ACL SETUSER", "shop", "resetpass", ">new")
        admin.execute_command("CLIENT KILL", "USER", "shop")
        eventually(lambda: len(recorder.of(RedisRefused)) >= 500, "logins are refused")
        told, tries = list(caplog.records), len(recorder.of(RedisRefused))
        admin.execute_command("ACL SETUSER", "shop", ">old")
        Queue("q", str, url=own_server.url).publish("x")
        recorder.wait_for(Acked)
        consumer.stop()

    lines = Counter(one.getMessage() for one in told if one.name.startswith("reliq"))
    assert any("the fetcher failed; retrying: Redis refused this user" in line for line in lines)
    assert max(lines.values()) <= tries.bit_length()
    assert len(lines) <= 6, "one for each part"
    assert not any(one.exc_info for one in told)
