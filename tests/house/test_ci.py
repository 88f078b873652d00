"""What CI runs is there, and what a bare machine may leave out fails in CI."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from order import LONGEST_FIRST
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "run").read_text("utf-8")
#: Tests that CI may leave out too: file -> why.
MAY_BE_SKIPPED = {
    "tests/required.py": "it fails in CI first",
    "tests/deployment/test_kubernetes.py": "a sandbox may allow no namespace of mounts",
    "tests/faults/test_two_versions.py": "a clone without its history has no version before",
    "tests/acceptance/test_starts_and_stops.py": "a sandbox may allow no namespace of processes",
    "tests/metrics/test_compose.py": "a sandbox may allow no namespace of a network",
    "tests/readme/test_migrating.py": "other queues are installed with --long alone",
    "tests/readme/test_howto.py": "a kernel of Jupyter takes longer than CI has, and packages that nothing else needs",
}


@pytest.mark.parametrize("words", re.findall(r"\btests/[\w/{},.]+", SCRIPT))
def test_every_path_that_ci_runs_is_there(words):
    expanded = subprocess.run(["bash", "-c", f"echo {words}"], capture_output=True, text=True, check=True).stdout

    assert [path for path in expanded.split() if not (ROOT / path).exists()] == []


def calls_of(path):
    """The names that are called in a file, as they are written."""
    tree = ast.parse(path.read_text("utf-8"))
    found = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found += [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and "mark" in ast.unparse(node)]
    return {ast.unparse(one) for one in found}


def test_a_test_that_a_bare_machine_skips_fails_in_ci_unless_it_is_known_why_not():
    skips = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip", "pytest.mark.xfail"}

    found = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if calls_of(path) & skips}

    assert found == MAY_BE_SKIPPED.keys(), "use must_run_in_ci of tests/required.py"


def test_the_files_that_begin_first_are_there():
    assert [name for name in LONGEST_FIRST if not (ROOT / "tests" / name).is_file()] == []


def test_no_two_files_of_tests_have_one_name():
    """Files are imported by their names alone: of two with one name pytest collects the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]

    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_locks_have_a_version_that_is_allowed_and_a_hash_of_everything_that_is_asked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    [ours] = [Requirement(one) for one in optional["dev"] if one.startswith(project["name"])]
    own = [*project["dependencies"], *optional["dev"], *(one for extra in ours.extras for one in optional[extra])]
    tools = [line for line in (ROOT / ".ci" / "tools.in").read_text("utf-8").splitlines() if not line.startswith("#")]
    for name, texts in (("lock.txt", own), ("tools.txt", tools)):
        lock = (ROOT / ".ci" / name).read_text("utf-8")
        pinned = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\\n]+)", lock, re.MULTILINE))
        asked = {canonicalize_name(one.name): one for one in map(Requirement, texts) if one.name != project["name"]}

        wrong = {one for one, it in asked.items() if one not in pinned or not it.specifier.contains(pinned[one])}

        assert wrong == set(), "run .ci/do lock"
        assert re.findall(r"^[a-z0-9-]+==[^\n]*[^\\\n]$", lock, re.MULTILINE) == [], "no hash follows"


def test_the_workflow_does_what_the_script_does_and_has_the_pythons_that_it_looks_for():
    [job] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"].values()
    [python] = [
        step["with"]["python-version"].split() for step in job["steps"] if "setup-python" in step.get("uses", "")
    ]
    [command] = [step["run"] for step in job["steps"] if "run" in step]

    assert command.endswith(" .ci/run")
    assert python == [*re.search(r"for version in ([\d. ]+);", SCRIPT)[1].split(), "3.11"]
