"""`reliq bench` measures everything it promises, and leaves nothing behind, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import redis

from reliq.bench import PARTS, Bench, Scale, bare
from reliq.bench.drain import COURSES
from reliq.bench.stage import Stage
from reliq.errors import ConfigurationError, ReliqError

#: Many processes are started and waited for: on a busy machine that takes its time.
pytestmark = pytest.mark.timeout(300)

#: Unit and number of figures of each part.
FIGURES = {
    "drain": ("messages/s", len(COURSES)),
    "publish": ("messages/s", 3),
    "lateness": ("ms", 6),
    "pickup": ("ms", 3),
    "idle": ("round trips/s", 1),
    "memory": ("bytes", 2),
}
PATIENCE_SECONDS = 120
TINY = Scale(rounds=1, drained=1000, singles=200, many=1000, late_seconds=0.1, pickups=5, idle_seconds=1.5, stored=2000)


@pytest.fixture
def started(url: str):
    """Start `reliq bench` with options; what still runs at the end of the test is killed."""
    processes = []

    def start(*options: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "reliq", "bench", "--url", url, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def eventually(holds) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def read_from_standard_output(process) -> dict:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert err == ""
    return json.loads(out)


def test_every_part_has_its_figures_nothing_began_early_and_no_key_stays(url: str, client: redis.Redis):
    figures = Bench(url, scale=TINY).run().figures

    found = {part: [one for one in figures if one.part == part] for part in PARTS}
    assert {part: ({one.unit for one in rows}, len(rows)) for part, rows in found.items()} == {
        part: ({unit}, number) for part, (unit, number) in FIGURES.items()
    }
    assert [one for one in figures if one.value <= 0] == []
    assert [one for part in ("drain", "publish", "lateness", "pickup") for one in found[part] if not one.share] == []
    assert client.keys() == []


def test_machines_get_json_with_each_figures_share(started):
    report = read_from_standard_output(started("--quick", "--only", "memory", "--json"))

    assert set(report) == {"redis", "place", "quick", "figures"}
    assert [set(one) for one in report["figures"]] == [{"part", "name", "value", "unit", "bare", "share"}] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_key_stays_when_it_is_interrupted_or_killed_amid_a_drain(started, client: redis.Redis, number):
    process = started("--quick", "--only", "drain")
    assert eventually(lambda: psutil.Process(process.pid).children() and client.keys("*:unack"))
    others = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(number)

    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode != 0
    assert psutil.wait_procs(others, PATIENCE_SECONDS)[1] == []
    assert client.keys() == []


def test_a_killed_worker_ends_it_with_a_word_and_no_key_stays(started, client: redis.Redis):
    process = started("--quick", "--only", "idle")
    ours = psutil.Process(process.pid)
    assert eventually(lambda: _workers(ours) and client.exists("reliq:workers"))

    _workers(ours)[0].kill()

    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err.startswith("reliq: a worker process of the benchmark ")
    assert client.keys() == []


def _workers(ours: psutil.Process) -> list[psutil.Process]:
    return [child for child in ours.children() if "reliq.bench.child" in child.cmdline()]


def test_other_keys_are_named_asked_about_and_left_alone(started, client: redis.Redis):
    client.set("theirs", "1")

    asked = started("--quick", "--only", "memory")
    _, err = asked.communicate(timeout=PATIENCE_SECONDS)
    agreed = read_from_standard_output(started("--quick", "--only", "memory", "--yes", "--json"))

    assert asked.returncode == 2
    assert "This Redis is in use (1 key)" in err
    assert "say --yes" in err
    assert [one["part"] for one in agreed["figures"]] == ["memory", "memory"]
    assert client.keys() == [b"theirs"]


def test_a_redis_without_room_is_refused(url: str, client: redis.Redis):
    client.config_set("maxmemory", "4mb")
    try:
        with pytest.raises(ConfigurationError, match=r"needs about \d+ MiB, and this Redis has \d MiB left"):
            Bench(url).in_use()
    finally:
        client.config_set("maxmemory", "0")


def test_messages_that_are_gone_are_not_waited_for(url: str):
    stage = Stage(url, "bare", TINY, lifeline=-1)

    with pytest.raises(ReliqError, match="only 0 of 1 messages came due"):
        bare.begin_when_due(stage, [time.time() - 1000], lambda _due: None)


def test_an_unknown_part_is_refused(url: str):
    with pytest.raises(ConfigurationError, match="parts are drain, publish, .*, not 'drian'"):
        Bench(url, only=["drian"])


def test_a_person_gets_a_table(started):
    out, err = started("--quick", "--only", "memory").communicate(timeout=PATIENCE_SECONDS)

    assert err == ""
    assert "a ready message" in out
    assert os.linesep in out


def test_a_cluster_is_measured_at_the_node_of_the_queue_and_nothing_stays(cluster):
    figures = Bench(cluster.url, only=["publish", "pickup", "memory"], scale=TINY).run().figures

    assert [one.unit for one in figures] == ["messages/s"] * 3 + ["ms"] * 3 + ["bytes"] * 2
    assert [cluster.client(server).dbsize() for server in cluster.primaries()] == [0, 0, 0]
