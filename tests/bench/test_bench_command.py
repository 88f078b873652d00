"""`reliq bench` measures all parts, and leaves no process or key behind, however it ends."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import redis
from waiting import eventually

from reliq.admin.bench import measure, server_in_use
from reliq.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIGURES = [
    "publish one by one, messages/s",
    "publish_many, messages/s",
    "drain by 1 process, messages/s",
    "drain by 2 processes, messages/s",
    "pickup p50, ms",
    "pickup p99, ms",
]
PATIENCE_SECONDS = 120
TINY = 1000


@pytest.fixture
def started(url: str):
    """Start `reliq bench` with options; kill remaining processes at the end of the test."""
    with ExitStack() as stack:

        def start(*options: str) -> subprocess.Popen:
            command = [Path(sys.executable).with_name("reliq"), "bench", "--url", url, *options]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def output_of(process) -> str:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, "")
    return out


def test_every_part_has_its_figure_as_json_and_in_a_table(started, client: redis.Redis, tmp_path, monkeypatch):
    """It also works beside a module with the name of a standard module."""
    (tmp_path / "queue.py").write_text("")
    monkeypatch.chdir(tmp_path)

    table = output_of(started("--messages", str(TINY)))
    report = json.loads(output_of(started("--messages", str(TINY), "--json")))

    assert list(report["figures"]) == FIGURES
    assert min(report["figures"].values()) > 0
    assert report["messages"] == TINY
    assert [line.split("  ")[0] for line in table.splitlines()[2:]] == FIGURES
    assert client.keys() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_bench_that_ends_amid_a_drain_leaves_no_key_and_no_process(started, client: redis.Redis, number):
    process = started("--messages", "100000")
    ours = psutil.Process(process.pid)
    # Do not list all Redis keys before: that would block the benchmark while it fills its queue.
    is_draining = lambda: _workers(ours) and client.keys("*:unack")  # noqa: E731
    eventually(lambda: is_draining() or process.poll() is not None, "messages are drained", 200)
    assert process.poll() is None, process.communicate()
    others = ours.children(recursive=True)

    process.send_signal(number)

    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + number
    assert psutil.wait_procs(others, PATIENCE_SECONDS)[1] == []
    assert client.keys() == []


def test_bench_with_a_killed_worker_fails_with_the_reason_and_leaves_no_key(started, client: redis.Redis):
    process = started("--messages", "100000")
    ours = psutil.Process(process.pid)
    worker, *_ = eventually(lambda: client.exists("reliq:workers") and _workers(ours), "a worker process runs", 200)

    worker.kill()

    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err.startswith("reliq: a worker process of the benchmark ")
    assert client.keys() == []


def _workers(ours: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in ours.children():
        with suppress(psutil.Error):  # it has just ended
            if "reliq.admin.bench" in child.cmdline():
                found.append(child)
    return found


def test_bench_on_a_redis_in_use_asks_and_leaves_other_keys_alone(started, client: redis.Redis):
    client.set("theirs", "1")

    asked = started("--messages", str(TINY))
    _, err = asked.communicate(timeout=PATIENCE_SECONDS)
    output_of(started("--messages", str(TINY), "--yes"))

    assert asked.returncode == 2
    assert "This Redis is in use (1 key)" in err
    assert "add --yes" in err
    assert client.keys() == [b"theirs"]


def test_redis_without_memory_is_refused(url: str, client: redis.Redis):
    client.config_set("maxmemory", "4mb")
    try:
        with pytest.raises(ConfigurationError, match=r"needs about 13 MiB, and this Redis has \d MiB left"):
            server_in_use(url, 20_000)
    finally:
        client.config_set("maxmemory", "0")


def test_cluster_is_measured_and_no_key_stays(cluster):
    assert server_in_use(cluster.url, TINY)[1] == 0
    assert list(measure(cluster.url, TINY)) == FIGURES
    assert [cluster.client(server).dbsize() for server in cluster.primaries()] == [0, 0, 0]
