"""Shared metrics: one process counts, another reads and adds up; counts survive their process."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from required import must_run_in_ci

from reliq import events
from reliq.metrics import names
from reliq.metrics.names import Spec
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.store import FIRST_BYTES, Children, Figures, FiguresReader, file_of


def rows(collector):
    """Return all series of a collector: (name, *labels) -> value."""
    return {
        (family.spec.name, *labels): value for family in collector.families() for labels, value in family.rows.items()
    }


def failed(name, queue="q"):
    return events.Handled(queue, "id", 1, "nack", 0.01, raised=f"{name} at jobs.py:3", failed=True)


def test_figures_of_one_process_are_read_by_another_while_the_file_grows(tmp_path):
    counted, reader = Figures(tmp_path / "1.figures"), FiguresReader()
    first = Spec("first", "")
    counted.add(first, (), 2)
    assert dict(reader.series((tmp_path / "1.figures").read_bytes())) == {("first",): (2.0,)}

    many = Spec("many", "", ("number",), buckets=tuple(map(float, range(38))))
    for number in range(1000):
        counted.begin(many, str(number))
    counted.observe(many, ("999",), 0.5)
    counted.add(first)

    raw = (tmp_path / "1.figures").read_bytes()
    found = dict(reader.series(raw))
    assert len(raw) > FIRST_BYTES
    assert len(found) == 1001
    assert found["first",] == (3.0,)
    assert found["many", "999"] == (0, 1, *(0,) * 37, 0.5)


@pytest.mark.parametrize("name", ["1.figures", None], ids=["file", "memory"])
def test_counts_of_threads_are_not_lost_while_series_are_added(tmp_path, name):
    counted, every = Figures(name and tmp_path / name), Spec("all", "")

    def count(thread):
        for number in range(400):
            counted.add(every)
            counted.begin(Spec(str(thread), "", buckets=(1.0, 2.0, 3.0)), str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))

    assert dict(FiguresReader().series(counted.raw()))["all",] == (1600.0,)


@pytest.fixture
def children(tmp_path):
    return Children(lambda: tmp_path)


@pytest.fixture
def process(tmp_path):
    return lambda pid, *queues: ProcessMetrics([(queue, "") for queue in queues], file_of(tmp_path, pid))


def test_sums_add_counters_and_histograms_and_merge_each_gauge(children, process, tmp_path):
    for pid, longest, claimed in ((1, 5.0, 300.0), (2, 7.0, 200.0)):
        process(pid, "q")(events.Handled("q", "id", 1, "ack", 0.25))
        told = Figures(file_of(tmp_path, 10 * pid))
        told.set(names.LONGEST, (), longest)
        told.set(names.LAST_CLAIM, (), claimed)
        told.set(names.SLOTS, (), 16.0)
        told.set(Spec("unknown_to_this_version", ""), (), 16.0)

    found = rows(children)

    *buckets, seconds = found["reliq_handler_seconds", "q", "", "ack"]
    assert (sum(buckets), seconds) == (2, 0.5)
    assert found["reliq_leases_lost_total", "q"] == 0
    assert found["reliq_longest_running_seconds",] == 7
    assert found["reliq_last_claim_timestamp_seconds",] == 200
    assert found["reliq_slots",] == 32


def test_sums_after_many_restarts_have_every_count_and_no_gauge_of_the_dead(children, process, tmp_path):
    living = process(1, "q")
    living(events.LeaseLost("q", ("a",), "ack"))
    for pid in range(2, 202):
        one = process(pid)
        one(events.LeaseLost("q", ("b",), "ack"))
        one.sample(None)
        Figures(file_of(tmp_path, 1000 + pid)).set(names.SLOTS, (), 16.0)
        children.bury(pid)
        children.bury(1000 + pid)

    found = rows(children)

    assert found["reliq_leases_lost_total", "q"] == 201
    assert ("reliq_slots",) not in found
    assert [file.name for file in tmp_path.iterdir()] == ["1.figures"]


def test_process_with_the_pid_of_a_dead_process_is_counted(children, process):
    for queue in ("q", "another"):
        process(1, queue)(events.LeaseLost(queue, ("a",), "ack"))
        rows(children)
        children.bury(1)

    found = rows(children)
    assert [found["reliq_leases_lost_total", queue] for queue in ("q", "another")] == [1, 1]


def test_sums_ignore_files_of_an_earlier_run(process, tmp_path):
    process(1, "q")(events.RenewalLate("q", 1.0))

    assert rows(Children(lambda: tmp_path)) == {}


def test_sums_keep_twenty_classes_of_exceptions_for_a_queue(children, process):
    for pid in range(4):
        one = process(pid)
        for number in range(30):
            one(failed(f"Error{pid}{number}"))
        assert len([key for key in rows(one) if key[0] == "reliq_handler_failures_total"]) == 21
        if pid % 2:
            children.bury(pid)

    found = {key[3]: value for key, value in rows(children).items() if key[0] == "reliq_handler_failures_total"}

    assert len(found) == 21
    assert sum(found.values()) == 120
    assert found["other"] == 100


def test_concurrent_scrapes_count_nothing_twice():
    metrics = ProcessMetrics((f"q{number}", "") for number in range(200))
    for number in range(200):
        metrics(events.LeaseLost(f"q{number}", ("a",), "ack"))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(rows, [metrics] * 8))
    finally:
        sys.setswitchinterval(before)

    lost = [sum(figure for key, figure in one.items() if key[0] == "reliq_leases_lost_total") for one in found]
    assert lost == [200] * 8


def test_failures_are_counted_by_class_and_final_nacks_as_nack():
    metrics = ProcessMetrics([("q", "")])
    for _ in range(2):
        metrics(failed("ValueError"))
    metrics(events.Handled("q", "id", 1, "timeout", 5.0, raised="TimeoutError", failed=True))
    metrics(events.Handled("q", "id", 1, "nack", 0.1, error="no retry is left", failed=True))
    metrics(events.Handled("q", "id", 1, "nack", 0.1, error="not now"))
    metrics(events.Handled("q", "id", 1, "ack", 0.1))

    found = {key[3]: value for key, value in rows(metrics).items() if key[0] == "reliq_handler_failures_total"}
    assert found == {"ValueError": 2, "TimeoutError": 1, "Nack": 1}


def test_reconnect_of_many_parts_is_counted_once():
    metrics = ProcessMetrics()
    assert rows(metrics)["reliq_redis_reconnects_total",] == 0
    for part in ("fetcher", "scheduler", "fetcher"):
        metrics(events.RedisUnavailable("", part, "gone"))
    metrics(events.RedisRefused("q", "settler", "OOM"))
    for part in ("scheduler", "settler", "fetcher", "fetcher"):
        metrics(events.RedisRecovered("", part))

    found = rows(metrics)

    assert found["reliq_redis_errors_total", "away"] == 3
    assert found["reliq_redis_errors_total", "refused"] == 1
    assert found["reliq_redis_reconnects_total",] == 1


def test_refused_writes_are_not_counted_as_a_redis_that_is_away():
    metrics = ProcessMetrics()
    for refusal in ("READONLY", "NOREPLICAS", "MISCONF", "LOADING", "CLUSTERDOWN", ""):
        metrics(events.RedisUnavailable("", "fetcher", "no", refusal))

    found = rows(metrics)

    assert found["reliq_redis_errors_total", "refused"] == 3
    assert found["reliq_redis_errors_total", "away"] == 3


def test_figures_on_a_full_disk_no_longer_grow_and_kill_no_process(tmp_path, caplog):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", tmp_path], check=False).returncode:
        must_run_in_ci("this user may not mount a small disk")
    try:
        figures = Figures(tmp_path / "1.figures")
        first = Spec("reliq_first", "")
        for number in range(20_000):
            figures.begin(Spec(f"reliq_{number}", ""))
            figures.add(first)

        assert "cannot enlarge" in caplog.text
        assert dict(FiguresReader().series(figures.raw()))["reliq_first",] == (20_000.0,)
    finally:
        del figures
        subprocess.run(["umount", "-l", tmp_path], check=True)
