"""One endpoint for many processes: metrics of child processes are summed and survive their process."""

import itertools
import os
import signal
from pathlib import Path

import psutil
import pytest
from patience import only, scrape, value
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from waiting import eventually

from reliq.metrics.store import Files

HANDLED = "reliq_handler_seconds_count"


def counters(found):
    """Return the metrics that must never decrease; a new process starts its CPU time at zero."""
    ends = ("_total", "_count", "_bucket", "_sum")
    return {key: figure for key, figure in found.items() if key[0].endswith(ends) and key[0].startswith("reliq_")}


def of_processes(found, name):
    """Return a metric of each process, by its label."""
    return {dict(labels)["process"]: figure for (one, labels), figure in found.items() if one == name}


@pytest.mark.slow
def test_children_killed_between_scrapes_turn_no_counter_back_and_are_counted(worker, jobs):
    running, port = worker()
    pages = [scrape(port)]

    def killed():
        pages.append(scrape(port))
        return value(pages[-1], "reliq_restarts_total", reason="killed")

    for before in range(3):
        jobs.SHOP.publish_many(["good"] * 200)
        assert killed() == before
        eventually(running.children, "a child runs")
        running.children()[0].send_signal(signal.SIGKILL)
        eventually(lambda before=before: killed() == before + 1, "the restart is counted")
    eventually(lambda: killed() == 3 and value(pages[-1], "reliq_workers") == 2, "both places are taken again")

    # If Redis replies too late, the page has fewer metrics.
    while len(whole := [page for page in pages if only(page, "reliq_redis_up") == 1]) <= 10:
        killed()

    first, last = (of_processes(page, "process_start_time_seconds") for page in (pages[0], pages[-1]))
    assert set(first) == set(last) == {"supervisor", "0", "1"}  # a new process takes over the label
    assert first["supervisor"] == last["supervisor"]
    assert first != last
    memory = of_processes(pages[-1], "process_resident_memory_bytes")["supervisor"]
    assert memory == pytest.approx(psutil.Process(running.process.pid).memory_info().rss, rel=0.5)
    assert min(of_processes(pages[-1], "process_open_fds").values()) >= 3
    assert of_processes(pages[-1], "process_cpu_seconds_total")["supervisor"] > 0
    for earlier, later in itertools.pairwise(whole):
        assert {key for key, figure in counters(earlier).items() if later.get(key, -1) < figure} == set()


@pytest.mark.slow
def test_counts_of_replaced_children_stay_and_their_files_do_not(worker, jobs):
    running, port = worker("--max-jobs", "20", processes=1)

    def replaced():
        return value(scrape(port), "reliq_restarts_total", reason="jobs")

    for before in range(3):
        jobs.SHOP.publish_many(["good"] * 20)
        eventually(lambda before=before: replaced() == before + 1, "a process was replaced")

    assert value(scrape(port), HANDLED, queue="shop", task="", outcome="ack") == 60
    (child,) = eventually(running.children, "the place is taken again")
    folder = Path(child.environ()["PROMETHEUS_MULTIPROC_DIR"])
    eventually(lambda: [file.name for file in folder.glob("*.figures")] == [f"{child.pid}.figures"], "it counts")
    assert {file.name for file in folder.glob("*.db")} <= {"counter_dead.db", f"counter_{child.pid}.db"}
    assert value(scrape(port), "shop_bodies_total") == 60


#: Larger than any pid.
MOST = int(Path("/proc/sys/kernel/pid_max").read_text())


def write(folder, kind, pid, rows):
    file = MmapedDict(str(folder / f"{kind}_{pid}.db"))
    for name, figure in rows.items():
        file.write_value(mmap_key(name, name, ["queue"], ["q"], "help"), figure, 1.0)
    file.close()


def sums(files):
    return {sample.name: sample.value for family in files.collect() for sample in family.samples}


def test_sweep_after_many_restarts_keeps_one_file_of_each_kind_and_every_count(tmp_path):
    write(tmp_path, "counter", 1, {"jobs_total": 7})  # of an earlier run
    files = Files(lambda: tmp_path)
    write(tmp_path, "counter", os.getpid(), {"jobs_total": 5})
    (tmp_path / f"histogram_{MOST + 1}.db").touch()  # an empty file must not break a scrape
    assert sums(files) == {"jobs_total": 5}

    for number in range(20):
        write(tmp_path, "counter", MOST + 2 + number, {"jobs_total": 1})
        write(tmp_path, "gauge_livesum", MOST + 2 + number, {"slots": 16})
        if number % 10 == 0:
            write(tmp_path, "gauge_max", MOST + 2 + number, {"peak": number})
        files.sweep()

    assert sums(files) == {"jobs_total": 25, "peak": 10}
    assert len(list(tmp_path.iterdir())) == 3
