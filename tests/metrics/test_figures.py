"""The figures of processes: counted by one, read by another, added up, kept when their process died."""

import os
import sys
import threading
from itertools import pairwise

import pytest

from reliq import events
from reliq.metrics import figures as figures_module, names
from reliq.metrics.figures import FIRST_BYTES, Figures, FiguresReader
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.sums import Children, file_of


def rows(collector):
    """All series of a collector: (name, *labels) -> value."""
    return {
        (family.spec.name, *labels): value for family in collector.families() for labels, value in family.rows.items()
    }


def failed(name, queue="q"):
    return events.Handled(queue, "id", 1, "nack", 0.01, raised=f"{name} at jobs.py:3", failed=True)


class TestAFile:
    def test_what_one_process_counts_another_reads_also_when_the_file_has_grown(self, tmp_path):
        counted, reader = Figures(tmp_path / "1.figures"), FiguresReader()
        first = counted.place(("first",), 0.0)
        counted.add(first, 2)
        assert dict(reader.series((tmp_path / "1.figures").read_bytes())) == {("first",): (2.0,)}

        many = [counted.place(("many", str(number)), *(0.0,) * 40) for number in range(1000)]
        counted.observe(many[-1], [float(number) for number in range(38)], 0.5)
        counted.add(first)

        raw = (tmp_path / "1.figures").read_bytes()
        found = dict(reader.series(raw))
        assert len(raw) > FIRST_BYTES
        assert len(found) == 1001
        assert found["first",] == (3.0,)
        assert found["many", "999"] == (0, 1, *(0,) * 37, 0.5)

    @pytest.mark.parametrize("name", ["1.figures", None])
    def test_threads_lose_no_count_while_new_series_come(self, tmp_path, name):
        counted = Figures(name and tmp_path / name)

        def count(thread):
            for number in range(400):
                counted.add(counted.place(("all",), 0.0))
                counted.place((str(thread), str(number)), *(0.0,) * 5)

        threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

        assert dict(FiguresReader().series(counted.raw()))["all",] == (1600.0,)

    def test_a_key_is_read_once_however_often_its_numbers_are(self, tmp_path, monkeypatch):
        counted, reader, read = Figures(tmp_path / "1.figures"), FiguresReader(), []
        places = [counted.place((str(number),), 0.0) for number in range(50)]
        loads = figures_module.json.loads
        monkeypatch.setattr(figures_module.json, "loads", lambda text: read.append(text) or loads(text))

        for _ in range(3):
            counted.add(places[0])
            assert len(dict(reader.series(counted.raw()))) == 50

        assert len(read) == 50

    @pytest.mark.parametrize("length", [0, 4, 8])
    def test_a_file_that_its_process_did_not_come_to_fill_has_no_series(self, length):
        assert list(FiguresReader().series(bytes(length))) == []


class TestManyProcesses:
    @pytest.fixture
    def children(self, tmp_path):
        return Children(tmp_path)

    @pytest.fixture
    def process(self, tmp_path):
        return lambda pid, *queues: ProcessMetrics(queues, file_of(tmp_path, pid))

    def test_counters_and_histograms_are_added_up_and_gauges_each_in_its_way(self, children, process, tmp_path):
        for pid, longest, claimed in ((1, 5.0, 300.0), (2, 7.0, 200.0)):
            process(pid, "q")(events.Handled("q", "id", 1, "ack", 0.25))
            told = Figures(file_of(tmp_path, 10 * pid))
            told.place(("reliq_longest_running_seconds",), longest)
            told.place(("reliq_last_claim_timestamp_seconds",), claimed)
            told.place(("reliq_slots",), 16.0)
            told.place(("unknown_to_this_version",), 16.0)

        found = rows(children)

        assert (
            sum(found["reliq_handler_seconds", "q", "ack"][:-1]),
            found["reliq_handler_seconds", "q", "ack"][-1],
        ) == (2, 0.5)
        assert found["reliq_leases_lost_total", "q"] == 0
        assert found["reliq_longest_running_seconds",] == 7
        assert found["reliq_last_claim_timestamp_seconds",] == 200
        assert found["reliq_slots",] == 32

    def test_however_many_restarts_leave_no_file_and_every_count(self, children, process, tmp_path):
        living = process(1, "q")
        living(events.Lost("q", ("a",), "ack"))
        for pid in range(2, 202):
            one = process(pid)
            one(events.Lost("q", ("b",), "ack"))
            one.sample(None)
            children.bury(pid)

        found = rows(children)

        assert found["reliq_leases_lost_total", "q"] == 201
        assert ("reliq_slots",) not in found
        assert [file.name for file in tmp_path.iterdir()] == ["1.figures"]

    def test_files_of_an_earlier_run_are_not_counted(self, process, tmp_path):
        process(1, "q")(events.RenewalLate("q", 1.0))

        assert rows(Children(tmp_path)) == {}

    def test_a_process_of_whom_nothing_is_known_is_buried_in_peace(self, children):
        children.bury(os.getpid())

        assert rows(children) == {}

    def test_a_queue_has_twenty_classes_of_exceptions_and_others_however_many_processes_meet_which(
        self, children, process
    ):
        for pid in range(4):
            one = process(pid)
            for number in range(30):
                one(failed(f"Error{pid}{number}"))
            assert len([key for key in rows(one) if key[0] == "reliq_handler_failures_total"]) == 21
            if pid % 2:
                children.bury(pid)

        found = {key[2]: value for key, value in rows(children).items() if key[0] == "reliq_handler_failures_total"}

        assert len(found) == 21
        assert sum(found.values()) == 120
        assert found["other"] == 100


class TestOneProcess:
    def test_scrapes_at_the_same_time_count_nothing_twice(self):
        metrics = ProcessMetrics([f"q{number}" for number in range(200)])
        for number in range(200):
            metrics(events.Lost(f"q{number}", ("a",), "ack"))
        before, found = sys.getswitchinterval(), []
        sys.setswitchinterval(1e-6)
        try:
            scrapes = [threading.Thread(target=lambda: found.append(rows(metrics))) for _ in range(8)]
            for one in scrapes:
                one.start()
            for one in scrapes:
                one.join()
        finally:
            sys.setswitchinterval(before)

        lost = [sum(figure for key, figure in one.items() if key[0] == "reliq_leases_lost_total") for one in found]
        assert lost == [200] * 8

    def test_failures_are_told_by_class_and_answers_that_fail_for_good_as_nack(self):
        metrics = ProcessMetrics(["q"])
        for event in (
            failed("ValueError"),
            failed("ValueError"),
            events.Handled("q", "id", 1, "timeout", 5.0, raised="TimeoutError", failed=True),
            events.Handled("q", "id", 1, "nack", 0.1, error="no retry is left", failed=True),
            events.Handled("q", "id", 1, "nack", 0.1, error="not now"),
            events.Handled("q", "id", 1, "ack", 0.1),
        ):
            metrics(event)

        found = {key[2]: value for key, value in rows(metrics).items() if key[0] == "reliq_handler_failures_total"}
        assert found == {"ValueError": 2, "TimeoutError": 1, "Nack": 1}

    def test_redis_is_reached_again_once_however_many_parts_have_missed_it(self):
        metrics = ProcessMetrics()
        assert rows(metrics)["reliq_redis_reconnects_total",] == 0
        for part in ("fetcher", "scheduler", "fetcher"):
            metrics(events.RedisAway("", part, "gone"))
        metrics(events.RedisRefused("q", "settler", "OOM"))
        for part in ("scheduler", "settler", "fetcher", "fetcher"):
            metrics(events.RedisBack("", part))

        found = rows(metrics)

        assert found["reliq_redis_errors_total", "away"] == 3
        assert found["reliq_redis_errors_total", "refused"] == 1
        assert found["reliq_redis_reconnects_total",] == 1


def test_a_quantile_between_a_tenth_of_a_second_and_ten_minutes_is_off_by_at_most_half_or_by_the_known_steps():
    for buckets, coarse in (
        (names.HANDLER_BUCKETS, {(30, 60), (60, 120), (120, 300), (300, 600)}),
        (names.LAG_BUCKETS, set()),
    ):
        steps = [(one, after) for one, after in pairwise(buckets) if 0.5 <= one < 600]
        assert {step for step in steps if step[1] / step[0] > 1.7} == coarse


def test_a_queue_costs_a_worker_67_series():
    metrics = ProcessMetrics(["q"])
    figures = [
        (family.spec, value) for family in metrics.families() for key, value in family.rows.items() if "q" in key
    ]

    assert sum(spec.size + 1 if spec.kind == "histogram" else 1 for spec, _ in figures) == 67
