"""The page of all log lines and error texts of a run."""

import subprocess
import sys
from pathlib import Path

import pytest
from worker_process import Command, environment_for

from tests.messages import count


def test_lines_that_differ_in_ids_and_numbers_are_counted_together():
    line = (
        "2026-11-28T10:41:49.258+00:00 31203 INFO reliq queue q: message {}: attempt {} failed after {} s, see /a/b.py"
    )
    trace = [
        "Traceback (most recent call last):",
        '  File "/x/y.py", line 7, in work',
        "reliq.errors.ReliqError: no 7 | 8",
    ]

    found = count([line.format("0M3XKQ7T9W4Q.4", 1, 0.2), line.format("order-7x31415926", 12, 3.456), *trace])

    assert found == {
        ("INFO", "reliq", "queue q: message ID: attempt N failed after N s, see PATH"): 2,
        ("traceback", "reliq.errors.ReliqError", "no N / N"): 1,
    }


@pytest.mark.slow
def test_line_of_a_worker_that_a_test_starts_is_on_the_page(tmp_path, url, monkeypatch):
    monkeypatch.setenv("RELIQ_TEST_LOGS", str(tmp_path))
    (tmp_path / "shop.py").write_text(
        "import reliq\nconsumer = reliq.Consumer()\nconsumer.handler(reliq.Queue('q', str))(lambda body: None)\n"
    )
    worker = Command(tmp_path, environment_for(tmp_path, url), "worker", "shop:consumer", "--burst")
    code = worker.wait()
    worker.close()
    assert code == 0, worker.lines

    page = tmp_path / "page" / "messages.md"
    subprocess.run([sys.executable, "-m", "tests.messages", page, tmp_path], cwd=Path(__file__).parents[2], check=True)

    assert "| 1 | INFO | reliq | worker: ready; working on q |" in page.read_text().splitlines()
