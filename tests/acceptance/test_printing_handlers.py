"""What handlers print arrives as they print it, many at once."""

import re
from pathlib import Path

import pytest
from worker_process import Worker

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
JOBS = 1500


@pytest.fixture
def printing(environment, client):
    """A worker whose handlers print, and the queue that has all their jobs already."""
    import printing

    printing.PRINTS.publish_many(range(JOBS))
    worker = Worker("printing:consumer", HERE, environment, "--burst")
    yield worker
    worker.close()


def test_lines_that_many_handlers_print_at_once_arrive_whole(printing):
    """Python before 3.12.4 loses lines and writes freed memory when threads fill the buffer of a text at once."""
    code = printing.wait()

    said = "".join(printing.lines)
    assert code == 0, said[-1000:]
    assert sorted(map(int, re.findall(r"job (\d+) x{60}", said))) == list(range(JOBS))
