"""What is built is what is tested."""

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
from required import must_run_in_ci

import reliq

ROOT = Path(__file__).parents[2]
#: Sources: what Python and Redis run, and what a browser shows.
SHIPPED = {".py", ".lua", ".html", ".css", ".js", ".svg"}


#: The folders and files that are packed, as a release has them.
PACKED = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["sdist"][
    "include"
]


def build(checkout, folder):
    """Build both distributions of a checkout: (wheel, source distribution)."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--target",
        "sdist",
        "--directory",
        folder,
    ]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def copy_of_the_checkout(folder):
    """Return a copy of what is packed."""
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
    """A wheel built from a copy of this checkout in which somebody left a file."""
    copy = copy_of_the_checkout(tmp_path_factory.mktemp("littered"))
    for stray in ("secrets.env", "worker/dump.rdb", "notes"):
        (copy / "reliq" / stray).write_text("left here by mistake")
    return build(copy, tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def files(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_every_script_and_the_mark_that_it_is_typed(files):
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "reliq").rglob("*") if path.suffix in SHIPPED}

    assert len([name for name in ours if name.endswith(".lua")]) > 10
    assert ours | {"reliq/py.typed"} <= files


def test_the_wheel_has_nothing_else(files):
    sources = {name for name in files if name.startswith("reliq/")}

    assert {name for name in files - sources if not name.startswith("reliq_queue-")} == set()
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


def test_the_metadata_say_what_an_index_shows(wheel):
    [name] = [one for one in zipfile.ZipFile(wheel).namelist() if one.endswith("/METADATA")]
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))

    assert (metadata["Name"], metadata["License-Expression"]) == ("reliq-queue", "MIT")
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"embedded", "otel", "testing", "web", "sqlalchemy", "django", "psycopg"} < {
        *metadata.get_all("Provides-Extra")
    }
    assert [one for one in metadata.get_all("Requires-Dist") if re.match(r"reliq\b(?!-queue\[)", one)] == []
    assert metadata.get_all("Project-URL")
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_source_distribution_has_every_file_that_is_kept_of_what_it_packs_and_no_other(distributions):
    _, sdist = distributions
    if not (ROOT / ".git").exists():
        must_run_in_ci("this is not a checkout of git, so which files are kept is not known")
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKED]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    kept = {name for name in listed if (ROOT / name).exists()}

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        [top] = {name.partition("/")[0] for name in archive.getnames()}

    assert top == sdist.name.removesuffix(".tar.gz") == f"reliq_queue-{reliq.__version__}"
    assert names == kept | {"PKG-INFO", "pyproject.toml", ".gitignore"}


def test_a_release_is_built_twice_the_same_byte_for_byte(copy, distributions, tmp_path):
    """Wherever it is built, whenever its files were written, whoever may read them."""
    elsewhere = shutil.copytree(copy, tmp_path / "elsewhere")
    for path in elsewhere.rglob("*"):
        path.chmod(0o700 if os.access(path, os.X_OK) else 0o600)
        os.utime(path, (1_700_000_000, 1_700_000_000))

    again = build(elsewhere, tmp_path / "built")

    assert [one.name for one in again] == [one.name for one in distributions]
    assert [one.read_bytes() for one in again] == [one.read_bytes() for one in distributions]


@pytest.fixture
def environment(tmp_path):
    """An empty environment that sees the packages of this one; return what installs wheels in it, in their order."""
    subprocess.run(["uv", "venv", "--quiet", "--offline", "--python", sys.executable, tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    def install(*wheels, remove=()):
        uv = ["uv", "pip", *(("uninstall",) if remove else ("install", "--offline", "--no-index", "--no-deps"))]
        subprocess.run([*uv, "--quiet", "--python", python, *wheels, *remove], check=True)

    def run(*words):
        done = subprocess.run([python, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return install, run


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """A wheel named `reliq` whose package has that name too, as the index has one that is not ours."""
    path = tmp_path_factory.mktemp("stranger") / "reliq-0.0.48-py3-none-any.whl"
    information = "reliq-0.0.48.dist-info"
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


QUEUE = ("-c", "from reliq import Queue; print(Queue('orders').name)")


def test_a_stranger_of_the_same_package_is_told_at_import_and_the_advice_helps(wheel, stranger, environment):
    install, run = environment
    install(stranger)
    install(wheel)

    _, said, told = run(*QUEUE)
    install(remove=("reliq", "reliq-queue"))
    install(wheel)
    after = run("-W", "error", *QUEUE)

    assert said == "orders\n"
    assert "UserWarning: reliq 0.0.48 is installed into the same folder as reliq-queue" in told
    assert "run `pip uninstall reliq reliq-queue`, then `pip install reliq-queue`" in told
    assert after == (0, "orders\n", "")


def test_a_package_that_a_stranger_has_replaced_or_removed_is_told_by_every_command(wheel, stranger, environment):
    install, run = environment
    install(wheel)
    install(stranger)
    replaced = [run("-m", "reliq", "--version"), run(*QUEUE)]
    install(remove=("reliq",))
    removed = run(
        "-c", "import sys; sys.argv[1:] = ['worker', 'shop:consumer']; from reliq.cli.app import main; main()"
    )

    remedy = "run `pip uninstall reliq reliq-queue`, then `pip install reliq-queue`"
    assert (replaced[0][0], "reliq/__init__.py is not that of reliq-queue" in replaced[0][2]) == (78, True)
    assert remedy in replaced[0][2]
    assert "cannot import name 'Queue'" in replaced[1][2]  # Python's own: nothing of ours runs there
    assert (removed[0], "has lost its __init__.py" in removed[2], remedy in removed[2]) == (78, True, True)


def test_on_a_system_that_cannot_run_it_the_import_says_so():
    text = "import sys; sys.platform = 'win32'; import reliq"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)

    assert done.stderr.splitlines()[-1].startswith("ImportError: reliq needs a POSIX system")
