"""The table of the cost of shards, from made-up figures; no course runs here."""

from dataclasses import fields

from benchmarks.shards.__main__ import FULL, HEADS, table
from benchmarks.shards.course import Course, Figures
from benchmarks.shards.ground import Ground


def test_shards_table_has_a_row_of_medians_and_a_head_for_each_figure():
    course = Course(Ground("Cluster", "redis+cluster://127.0.0.1:1", []), 16, FULL)
    rounds = [Figures(worker=microseconds) for microseconds in (9.0, 30.0, 12.5)]

    head, _, row = table([course], [rounds]).splitlines()

    assert row.startswith("| Cluster | 16 | 0.0 | 0.0 | 12.5 | 0.0 |")
    assert head.count("|") == row.count("|")
    assert list(HEADS) == [one.name for one in fields(Figures)]
