"""`reliq bench` measures everything it promises, and leaves nothing behind, however it ends."""

import json
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis
from waiting import eventually

from reliq.admin.bench import Bench
from reliq.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Number of figures of each part, by its unit.
FIGURES = {
    ("drain", "messages/s"): 3,
    ("publish", "messages/s"): 2,
    ("lateness", "ms"): 2,
    ("pickup", "ms"): 2,
    ("idle", "round trips/s"): 1,
}
PATIENCE_SECONDS = 120
TINY = 1000


@pytest.fixture
def started(url: str):
    """Start `reliq bench` with options; what still runs at the end of the test is killed."""
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


def test_every_part_has_its_figures_and_no_key_stays(url: str, client: redis.Redis):
    figures = Bench(url, messages=TINY).run()

    assert Counter((one.part, one.unit) for one in figures) == FIGURES
    assert [one for one in figures if one.value <= 0] == []
    assert client.keys() == []


def test_only_one_part_is_measured_as_json_or_as_a_table(started):
    table = output_of(started("--quick", "--only", "publish"))
    report = json.loads(output_of(started("--quick", "--only", "publish", "--json")))

    assert "one by one" in table
    assert set(report) == {"redis", "place", "quick", "figures"}
    assert [set(one) for one in report["figures"]] == [{"part", "name", "value", "unit"}] * 2


def test_bench_beside_a_module_named_like_one_of_python_still_measures(started, tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("")
    monkeypatch.chdir(tmp_path)

    output_of(started("--quick", "--only", "drain"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_bench_that_ends_amid_a_drain_leaves_no_key_and_no_process(started, client: redis.Redis, number):
    process = started("--quick", "--only", "drain")
    ours = psutil.Process(process.pid)
    # No look at all keys before: it would hold up the benchmark while that fills its queue.
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
    process = started("--quick", "--only", "idle")
    ours = psutil.Process(process.pid)
    eventually(lambda: _workers(ours) and client.exists("reliq:workers"), "a worker process runs")

    _workers(ours)[0].kill()

    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err.startswith("reliq: a worker process of the benchmark ")
    assert client.keys() == []


def _workers(ours: psutil.Process) -> list[psutil.Process]:
    return [child for child in ours.children() if "reliq.admin.bench" in child.cmdline()]


def test_bench_on_a_redis_in_use_asks_and_leaves_other_keys_alone(started, client: redis.Redis):
    client.set("theirs", "1")

    asked = started("--quick", "--only", "publish")
    _, err = asked.communicate(timeout=PATIENCE_SECONDS)
    agreed = json.loads(output_of(started("--quick", "--only", "publish", "--yes", "--json")))

    assert asked.returncode == 2
    assert "This Redis is in use (1 key)" in err
    assert "say --yes" in err
    assert [one["part"] for one in agreed["figures"]] == ["publish", "publish"]
    assert client.keys() == [b"theirs"]


def test_unknown_part_and_redis_without_memory_are_refused(url: str, client: redis.Redis):
    client.config_set("maxmemory", "4mb")
    try:
        with pytest.raises(ConfigurationError, match=r"needs about \d+ MiB, and this Redis has \d MiB left"):
            Bench(url).in_use()
    finally:
        client.config_set("maxmemory", "0")
    with pytest.raises(ConfigurationError, match="parts are drain, publish, .*, not 'drian'"):
        Bench(url, only=["drian"])


def test_cluster_is_measured_and_no_key_stays(cluster):
    parts = ["publish", "pickup"]
    figures = Bench(cluster.url, only=parts, messages=TINY).run()

    assert Counter((one.part, one.unit) for one in figures) == {key: FIGURES[key] for key in FIGURES if key[0] in parts}
    assert [cluster.client(server).dbsize() for server in cluster.primaries()] == [0, 0, 0]
