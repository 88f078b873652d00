"""CI is complete: its paths exist, its lock files are complete, and each skipped test has a reason."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "run").read_text("utf-8")
#: Test files that CI may skip, with the reason.
MAY_BE_SKIPPED = {
    "tests/required.py": "it fails in CI first",
    "tests/scripts/held_server.py": "its clock cannot be held in Redis 8 and Valkey 9; CI runs the tests with older servers",
    "tests/deployment/test_kubernetes.py": "a sandbox may allow no namespace of mounts",
    "tests/acceptance/test_starts_and_stops.py": "a sandbox may allow no namespace of processes",
}


def test_paths_that_ci_runs_exist():
    words = " ".join(re.findall(r"\btests/[\w/{},.]+", SCRIPT))
    expanded = subprocess.run(["bash", "-c", f"echo {words}"], capture_output=True, text=True, check=True).stdout

    assert [path for path in expanded.split() if not (ROOT / path).exists()] == []


def test_tests_that_skip_in_ci_are_listed_with_their_reason():
    skips = re.compile(r"\bpytest\.(skip|importorskip|mark\.(skip|skipif|xfail))\b")
    paths = [path for path in (ROOT / "tests").rglob("*.py") if skips.search(path.read_text("utf-8"))]

    found = {str(path.relative_to(ROOT)) for path in paths}

    assert found == MAY_BE_SKIPPED.keys(), "use must_run_in_ci of tests/required.py"


def test_locks_have_an_allowed_version_and_a_hash_of_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    own = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    tools = [line for line in (ROOT / ".ci" / "tools.in").read_text("utf-8").splitlines() if not line.startswith("#")]
    for name, texts in (("lock.txt", own), ("tools.txt", tools)):
        lock = (ROOT / ".ci" / name).read_text("utf-8")
        pinned = dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\\n]+)", lock, re.MULTILINE))
        asked = {canonicalize_name(one.name): one for one in map(Requirement, texts) if one.name != project["name"]}

        wrong = {one for one, it in asked.items() if one not in pinned or not it.specifier.contains(pinned[one])}

        assert wrong == set(), "run .ci/do lock"
        assert re.findall(r"^[a-z0-9-]+==[^\n]*[^\\\n]$", lock, re.MULTILINE) == [], "no hash follows"


def test_workflow_runs_the_script_and_installs_its_pythons():
    [job] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"].values()
    [python] = [
        step["with"]["python-version"].split() for step in job["steps"] if "setup-python" in step.get("uses", "")
    ]
    [command] = [step["run"] for step in job["steps"] if "run" in step]

    assert command.endswith(" .ci/run")
    assert python == [*re.search(r"for version in ([\d. ]+);", SCRIPT)[1].split(), "3.11"]
