"""A Redis that does not let a worker in ends it with one line: trying again would not help."""

import pytest
from worker_process import Worker, environment_for

from reliq import Consumer, LoginError

JOBS = """
from reliq import Consumer
consumer = Consumer()
@consumer.handler("q")
def handle(body): ...
"""


@pytest.mark.parametrize(
    "url_of",
    [lambda url: url.replace("redis://", "redis://nobody:wrong@"), lambda url: url.replace("/0", "/9999")],
    ids=["password", "database"],
)
def test_a_consumer_that_may_not_log_in_does_not_start(url, url_of):
    consumer = Consumer(url_of(url))
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
    assert "Redis lets nobody in by this user, password or database" in worker.lines[0]
    assert "wrong@" not in worker.lines[0]
