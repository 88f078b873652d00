"""How Sphinx builds the site: `.ci/docs`.

The sources are the Markdown files of docs/, and a few others. A link to another Markdown file of the repository becomes its path as text.
A link to any other file becomes a download.
"""

import os
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
include_patterns = ["docs/**.md", "CHANGELOG.md", "benchmarks/README.md", "grafana/RUNBOOK.md"]
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
#: The groups of the navigation and their pages, in a reader's order. A page that a group does not name is found by `folder/*`.
_NAVIGATION = {
    "Get started": "installation tutorial concepts *",
    "Guides": (
        "guides/publishing guides/handlers guides/timeouts guides/dead-letters guides/periodic guides/ordering guides/outbox "
        "guides/testing guides/*"
    ),
    "Integrations": "integrations/fastapi integrations/django integrations/flask integrations/*",
    "Production": (
        "production/checklist production/workers production/deployment production/schema-changes production/redis "
        "production/security production/monitoring production/logging production/operations production/web "
        "production/scaling production/cluster production/troubleshooting ../grafana/RUNBOOK production/*"
    ),
    "Recipes": "recipes/idempotency recipes/*",
    "Migrating": "migrating/index migrating/celery migrating/rq migrating/dramatiq migrating/arq migrating/go",
    "How it works": "internals/guarantees internals/leases internals/model internals/account ../benchmarks/README internals/*",
    "Reference": "reference/api reference/api-more reference/api-admin reference/api-testing reference/cli reference/* ../CHANGELOG",
}

#: Pages whose own titles are made for another place.
_TITLES = {
    "../CHANGELOG": "Changelog",
    "../benchmarks/README": "Benchmarks",
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


#: A link to a Markdown file.
_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:)[^)\s#]+\.md)(?:#[^)\s]*)?\)")


def _without_link(app: Sphinx, page: str, link: re.Match[str]) -> str:
    """Return a link to a page of the site as it is, and any other as its text with the path in the repository."""
    target = (Path(app.srcdir) / page).parent / link[2]
    path = Path(os.path.normpath(target)).relative_to(app.srcdir)
    if path.with_suffix("").as_posix() in app.env.found_docs:
        return link[0]
    return f"{link[1]} (`{path}` in the repository)"


def _prepare(app: Sphinx, page: str, text: list[str]) -> None:
    """Change what a reader on GitHub would see: directives of the navigation, and both of two pictures."""
    text[0] = _LINK.sub(lambda link: _without_link(app, page, link), text[0])
    if page == root_doc:
        text[0] += _contents()
    text[0] = _LIGHT.sub(r"![\1](\2-light.png){.only-light}![\1](\2-dark.png){.only-dark}", text[0])


def setup(app: Sphinx) -> None:
    """Have pages prepared as they are read."""
    app.connect("source-read", _prepare)
