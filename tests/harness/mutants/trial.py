"""The trial of a mutant: copy the tree, apply the fault, and run the tests that must fail."""

import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.harness.mutants.mutant import KEYED, MODEL, ROOT, Mutant
from tests.programs import run

#: Number of the model's examples with `--long`.
PATIENT_EXAMPLES = 3000
HARNESS_SECONDS = 20
#: A survivor runs all examples: minutes on a busy machine.
TIMEOUT_SECONDS = 1200.0


@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """Whether a mutant was caught, after how many seconds, and the failure."""

    mutant: Mutant
    caught: bool
    seconds: float
    words: str


def try_out(mutant: Mutant, by: str) -> HandlerOutcome:
    """Run the test `by` on a copy of the tree with the mutant."""
    with tempfile.TemporaryDirectory(prefix="reliq-mutant-") as folder:
        copy = Path(folder) / "tree"
        copy.mkdir()
        for part in ("reliq", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        mutant.apply(copy / "reliq")
        start = time.monotonic()
        code, output = _run(_command(by, mutant.examples or PATIENT_EXAMPLES), copy)
        return HandlerOutcome(mutant, code == 1, time.monotonic() - start, _last_words(output) if code else "")


def _command(by: str, examples: int) -> list[str]:
    if by in (MODEL, KEYED):
        return ["-m", "tests.harness.mutants.try_model", by, str(examples)]
    return ["-m", "tests.harness.chaos", "--seconds", str(HARNESS_SECONDS), "--seed", "1", "--drain", "30"]


def _run(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run Python in the copy; after the timeout kill it with its children, which does not count as caught."""
    command = ["timeout", "--signal=KILL", TIMEOUT_SECONDS, sys.executable, *arguments]
    done = run(*command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, timeout=None)
    return done.returncode, done.stdout + done.stderr


def _last_words(output: str) -> str:
    """Return why the tests failed: the violated checks of the harness, or the first failed assertion."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    counts = re.findall(r"^\| (.+) \| ([1-9]\d*) \| 0 \|$", output, re.MULTILINE)
    if verdict := re.search(r"^# Chaos, seed \d+: (\w+)$", output, re.MULTILINE):
        return f"{verdict[1]}: " + ", ".join(f"{name} {found}" for name, found in counts)
    return ([line for line in lines if line.startswith("assert ")] or lines or ["it took too long"])[-1]
