"""The output of many concurrent handlers arrives as they printed it."""

import re

import pytest

pytestmark = pytest.mark.slow

JOBS = 1500


def test_lines_that_many_handlers_print_at_once_arrive_whole(worker, client):
    """Python before 3.12.4 loses lines and writes freed memory when threads fill a text buffer at the same time."""
    import printing

    printing.PRINTS.publish_many(range(JOBS))
    process = worker("--burst", place="printing:consumer")
    code = process.wait()

    said = "".join(process.lines)
    assert code == 0, said[-1000:]
    assert sorted(map(int, re.findall(r"job (\d+) x{60}", said))) == list(range(JOBS))
