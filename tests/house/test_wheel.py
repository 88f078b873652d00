"""What is built is what is tested."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import reliq

ROOT = Path(__file__).parents[2]
#: Sources: what Python and Redis run, and what a browser shows.
SHIPPED = {".py", ".lua", ".html", ".css", ".js", ".svg"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of this checkout in which somebody left a file."""
    folder, copy = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "reliq", copy / "reliq", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for stray in ("secrets.env", "worker/dump.rdb", "notes"):
        (copy / "reliq" / stray).write_text("left here by mistake")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def files(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_every_script_and_the_mark_that_it_is_typed(files):
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "reliq").rglob("*") if path.suffix in SHIPPED}

    assert len([name for name in ours if name.endswith(".lua")]) > 10
    assert ours | {"reliq/py.typed"} <= files


def test_the_wheel_has_nothing_else(files):
    sources = {name for name in files if name.startswith("reliq/")}

    assert {name for name in files - sources if not name.startswith("reliq-")} == set()
    assert {Path(name).suffix for name in sources} == {*SHIPPED, ".typed"}


def test_the_wheel_has_the_licence_and_the_command(wheel, files):
    names = sorted(name.rpartition("/")[2] for name in files)
    [entry] = [name for name in files if name.endswith("entry_points.txt")]

    assert "LICENSE" in names
    said = zipfile.ZipFile(wheel).read(entry).decode()
    assert "reliq = reliq." in said
    assert "[pytest11]\nreliq = reliq.testing.plugin\n" in said


def test_the_wheel_the_package_and_the_changelog_have_one_version(wheel):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    changelog = ROOT / "CHANGELOG.md"
    top = (
        re.search(r"^## \[?(\d+\.\d+\.\d+)", changelog.read_text("utf-8"), re.MULTILINE) if changelog.exists() else None
    )

    assert wheel.name.split("-")[1] == reliq.__version__ == declared
    assert top is None or top[1] == reliq.__version__


def test_on_a_system_that_cannot_run_it_the_import_says_so():
    text = "import sys; sys.platform = 'win32'; import reliq"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)

    assert done.stderr.splitlines()[-1].startswith("ImportError: reliq needs a POSIX system")
