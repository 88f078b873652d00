"""A few seconds of chaos, as a smoke test of the harness; `.ci/do chaos` runs it for minutes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "tests.harness.chaos", "--seed", "20261121", "--seconds", "8", "--rate", "100"]


@pytest.mark.timeout(600)
def test_chaos_of_a_few_seconds_violates_nothing(server_path, tmp_path):
    root = Path(__file__).parents[2]
    command = [*COMMAND, "--drain", "180", "--server", server_path, "--folder", tmp_path]

    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.search(r"# Chaos, seed 20261121: valid\n\n8 s, \d+ messages, [2-9] faults", done.stdout), done.stdout
    assert re.search(r"\n[1-9]\d* starts", done.stdout), done.stdout
    assert "| INFO | reliq | worker: ready; working on sturdy, frail |" in (tmp_path / "messages.md").read_text()
