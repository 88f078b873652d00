"""The wheel and the source distribution: their files, version, names and reproducible build."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from programs import python, run
from required import must_run_in_ci

import reliq

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Suffixes of packaged files: Python, Redis, browser, starter project.
SHIPPED = {".py", ".lua", ".html", ".css", ".js", ".svg", ".toml", ".yaml"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
#: The packaged folders and files.
PACKED = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def build(checkout, folder):
    """Build both distributions of a checkout: (wheel, source distribution)."""
    targets = ["--target", "wheel", "--target", "sdist", "--directory", folder]
    command = [sys.executable, "-m", "hatchling", "build", *targets]
    done = run(*command, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def copy_of_the_checkout(folder):
    """Return a copy of the packaged files."""
    for name in ("pyproject.toml", ".gitignore", *PACKED):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".work"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return copy_of_the_checkout(tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def distributions(copy, tmp_path_factory):
    """Both distributions, built from a copy of this checkout."""
    return build(copy, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of this checkout with stray files."""
    copy = copy_of_the_checkout(tmp_path_factory.mktemp("littered"))
    for stray in ("secrets.env", "worker/dump.rdb", "notes"):
        (copy / "reliq" / stray).write_text("left here by mistake")
    return build(copy, tmp_path_factory.mktemp("wheel"))[0]


def test_wheel_has_every_source_and_script_and_nothing_else(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "reliq").rglob("*") if path.suffix in SHIPPED}

    assert len([name for name in ours if name.endswith(".lua")]) > 10
    assert {name for name in files if not name.startswith("reliq_queue-")} == ours | {"reliq/py.typed"}


def test_wheel_has_one_version_its_entry_points_and_requirements(wheel):
    archive = zipfile.ZipFile(wheel)
    parts = {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist() if "-info/" in name}
    metadata = email.message_from_string(parts["METADATA"])
    top = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)

    assert wheel.name.split("-")[1] == reliq.__version__ == PROJECT["project"]["version"]
    assert top is None or top[1] == reliq.__version__
    assert "LICENSE" in parts
    assert "reliq = reliq." in parts["entry_points.txt"]
    assert "[pytest11]\nreliq = reliq.testing.plugin\n" in parts["entry_points.txt"]
    assert metadata["Name"] == "reliq-queue"
    # on PyPI `reliq` is another package
    assert [one for one in metadata.get_all("Requires-Dist") if re.match(r"reliq\b(?!-queue\[)", one)] == []


def test_source_distribution_has_every_tracked_file_it_packs_and_no_other(distributions):
    _, sdist = distributions
    if not (ROOT / ".git").exists():
        must_run_in_ci("this is not a checkout of git")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKED]
    listed = run(*command, cwd=ROOT).stdout.splitlines()
    kept = {name for name in listed if (ROOT / name).exists()}

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        [top] = {name.partition("/")[0] for name in archive.getnames()}

    assert top == sdist.name.removesuffix(".tar.gz") == f"reliq_queue-{reliq.__version__}"
    assert names == kept | {"PKG-INFO", "pyproject.toml", ".gitignore"}


def test_release_built_twice_is_the_same_byte_for_byte(copy, distributions, tmp_path):
    """The build does not depend on the folder, or on the times and modes of the files."""
    elsewhere = shutil.copytree(copy, tmp_path / "elsewhere")
    for path in elsewhere.rglob("*"):
        path.chmod(0o700 if os.access(path, os.X_OK) else 0o600)
        os.utime(path, (1_700_000_000, 1_700_000_000))

    again = build(elsewhere, tmp_path / "built")

    assert [one.name for one in again] == [one.name for one in distributions]
    assert [one.read_bytes() for one in again] == [one.read_bytes() for one in distributions]


def other_reliq(folder):
    """Write a wheel named `reliq` with a package of that name, like the unrelated distribution on PyPI."""
    path, information = folder / "reliq-0.0.48-py3-none-any.whl", "reliq-0.0.48.dist-info"
    files = {
        "reliq/__init__.py": "from reliq.parser import parse\n",
        "reliq/parser.py": "def parse(text):\n    return text\n",
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: reliq\nVersion: 0.0.48\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{information}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_commands_report_another_package_named_reliq_and_the_advice_helps(wheel, tmp_path):
    """Install into an empty environment that can import the packages of this environment."""
    own, see_orders = tmp_path / "venv" / "bin" / "python", "from reliq import Queue; print(Queue('orders').name)"
    subprocess.run(["uv", "venv", "--quiet", "--offline", "--python", sys.executable, tmp_path / "venv"], check=True)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    def uv(*words):
        subprocess.run(["uv", "pip", *words[:1], "--quiet", "--python", own, *words[1:]], check=True)

    def install(path):
        uv("install", "--offline", "--no-index", "--no-deps", path)

    def its_python(*words):
        done = run(own, *words, cwd=tmp_path)
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    remedy = "run `pip uninstall reliq reliq-queue`, then install reliq-queue again"
    install(other_reliq(tmp_path))
    install(wheel)
    _, out, beside = its_python("-c", see_orders)
    uv("uninstall", "reliq")
    code, _, lost = its_python("-c", "from reliq.cli.app import main; main()")
    uv("uninstall", "reliq-queue")
    install(wheel)
    after = its_python("-W", "error", "-c", see_orders)

    assert out == "orders\n"
    assert "UserWarning: reliq 0.0.48 is installed into the same folder as reliq-queue" in beside
    assert (code, "has lost its __init__.py" in lost) == (78, True)
    assert (remedy in beside, remedy in lost) == (True, True)
    assert after == (0, "orders\n", "")


def test_import_on_windows_fails_with_the_reason():
    text = "import sys; sys.platform = 'win32'; import reliq"
    done = python("-c", text)

    assert done.stderr.splitlines()[-1].startswith("ImportError: reliq needs a POSIX system")
