"""How Sphinx builds the site: `.ci/docs`.

The sources are the repository as it is laid out: a link between two files leads somewhere on GitHub and on the site
alike. Markdown becomes a page; any other file that is linked to comes along as it stands.
"""

import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_DOCS = Path(__file__).parent
_PROJECT = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]

project = "reliq"
author = "the authors of reliq"
release = version = _PROJECT["version"]

sys.path.insert(0, str(_DOCS / "extensions"))
extensions = ["myst_parser", "sphinx.ext.autodoc", "api_reference"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "*.md",
    "*/README.md",
    "grafana/PANELS.md",
    "grafana/RUNBOOK.md",
    "tests/faults/README.md",
    "tests/harness/README.md",
]
include_patterns += ["benchmarks/RESULTS.md"]
exclude_patterns = [".*", "build", "dist"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
nitpicky = True
smartquotes = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"reliq {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = html_show_copyright = html_show_sphinx = html_use_index = False

#: A picture that there is for dark pages, too.
_LIGHT = re.compile(r"!\[([^\]]*)\]\(([^)]*)-light\.png\)")
#: The groups of the navigation and their pages, in a reader's order. What is new in a folder is found there.
_NAVIGATION = {
    "Start": "../README installation tutorial",
    "Guides": (
        "publishing handlers workers deployment keys periodic workflows transactions testing dead-letters operations "
        "web monitoring redis cluster shards security go *"
    ),
    "How-to": "howto/*",
    "Migrating": "migrating/index migrating/*",
    "Explanations": "explanation/model explanation/leases explanation/promises explanation/account explanation/*",
    "Reference": "reference/*",
    "Project": (
        "comparison non-goals versions ../CHANGELOG ../SECURITY ../CONTRIBUTING writing ../reliq/README ../tests/README "
        "../tests/faults/README ../tests/harness/README ../benchmarks/README ../benchmarks/RESULTS ../grafana/README "
        "../grafana/PANELS ../grafana/RUNBOOK"
    ),
}

#: Pages whose own titles are made for another place.
_TITLES = {
    "../README": "README",
    "../CHANGELOG": "Changes",
    "../reliq/README": "The code",
    "../tests/README": "The tests",
    "../tests/faults/README": "Ways to fail",
    "../tests/harness/README": "The harness",
    "../benchmarks/README": "Benchmarks",
    "../benchmarks/RESULTS": "Figures",
    "../grafana/README": "Dashboard and alerts",
    "../grafana/PANELS": "Panels of the dashboard",
    "../grafana/RUNBOOK": "Runbook",
}


def _pages(entries: str, named: set[str]) -> list[str]:
    """Return the pages of a group: those that it names, and what is in a folder beside them."""
    pages = []
    for entry in entries.split():
        folder = entry.removesuffix("*")
        written = sorted(f"{folder}{page.stem}" for page in (_DOCS / folder).glob("*.md"))
        pages += [page for page in written if page not in named] if entry.endswith("*") else [entry]
    return pages


def _titled(entry: str) -> str:
    """Return an entry with the title that it has in the navigation."""
    return f"{_TITLES[entry]} <{entry}>" if entry in _TITLES else entry


def _contents() -> str:
    """Write the navigation as directives; a guide that it does not name is the last one."""
    named = {root_doc.removeprefix("docs/"), *" ".join(_NAVIGATION.values()).split()}
    parts = []
    for caption, entries in _NAVIGATION.items():
        pages = map(_titled, _pages(entries, named))
        parts += ["", "```{toctree}", f":caption: {caption}", ":hidden:", "", *pages, "```"]
    return "\n".join(parts)


def _prepare(_app: Sphinx, page: str, text: list[str]) -> None:
    """Change what a reader on GitHub would see: directives of the navigation, and both of two pictures."""
    if page == root_doc:
        text[0] += _contents()
    text[0] = _LIGHT.sub(r"![\1](\2-light.png){.only-light}![\1](\2-dark.png){.only-dark}", text[0])


def setup(app: Sphinx) -> None:
    """Have pages prepared as they are read."""
    app.connect("source-read", _prepare)
