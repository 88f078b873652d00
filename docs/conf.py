"""
Settings of Sphinx for the documentation site, which `.ci/docs` builds.

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
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "api_reference"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CHANGELOG.md", "benchmarks/README.md", "grafana/RUNBOOK.md"]
exclude_patterns = [".*", "build", "dist"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence"]
nitpicky = True
smartquotes = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"reliq {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(_DOCS / "_static" / "scorer.js")
html_extra_path = ["_extra"]
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"admonition-font-size": "0.9375rem", "admonition-title-font-size": "0.9375rem"},
}
# The copy button of a session copies the commands without prompts and output. A block that shows only output has no button.
copybutton_selector = ":not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_copy_empty_lines = False
html_copy_source = html_show_copyright = html_show_sphinx = html_use_index = False

#: The title of a page.
_TITLE = re.compile(r"^# .+\n", re.MULTILINE)
#: The empty heading of the table on the front page.
_CARDS = "| | |\n| --- | --- |\n"
#: A picture that also exists in a dark version.
_LIGHT = re.compile(r"!\[([^\]]*)\]\(([^)]*)-light\.png\)")
#: The groups of the navigation and their pages, in order. `folder/*` stands for all other pages of that folder.
_NAVIGATION = {
    "Get started": "installation tutorial concepts *",
    "Guides": (
        "guides/publishing guides/debounce guides/tasks guides/handlers guides/timeouts guides/long-jobs guides/results guides/dead-letters guides/periodic "
        "guides/schedules guides/ordering guides/cost-limits guides/shared-limits guides/outbox guides/testing guides/*"
    ),
    "Integrations": "integrations/fastapi integrations/django integrations/flask integrations/*",
    "Production": (
        "production/checklist production/workers production/deployment production/schema-changes production/redis "
        "production/security production/monitoring production/logging production/operations production/web "
        "production/scaling production/cluster production/managed-redis production/troubleshooting ../grafana/RUNBOOK production/*"
    ),
    "Recipes": "recipes/idempotency recipes/*",
    "Migrating": "migrating/index migrating/celery migrating/rq migrating/dramatiq migrating/arq migrating/go",
    "How it works": "internals/guarantees internals/leases internals/model internals/account ../benchmarks/README internals/*",
    "Reference": "reference/api reference/api-more reference/api-admin reference/api-testing reference/cli reference/* ../CHANGELOG",
}

#: Search words that occur in no title -> the page that the search must find for them.
_SEARCH_WORDS = {
    "docs/guides/debounce": ["coalesce", "overwrite", "update a job"],
    "docs/guides/dead-letters": ["dead letter queue", "dlq", "failed jobs"],
    "docs/guides/handlers": ["max retries"],
    "docs/guides/long-jobs": ["cursor", "long running", "resumable jobs"],
    "docs/guides/ordering": ["fifo", "priority", "rate limit", "throttle"],
    "docs/guides/periodic": ["schedule"],
    "docs/guides/schedules": ["cron at run time", "schedule for each tenant"],
    "docs/guides/publishing": ["cancel", "duplicates", "unique jobs"],
    "docs/guides/cost-limits": ["tokens per minute", "openai rate limit", "cost of a job", "llm"],
    "docs/guides/shared-limits": ["global rate limit", "provider limit", "shared rate limit"],
    "docs/guides/results": ["progress", "result backend", "return value", "task status"],
    "docs/guides/timeouts": ["hang"],
    "docs/internals/guarantees": ["crash", "lost jobs"],
    "docs/production/monitoring": ["monitoring"],
    "docs/production/web": ["dashboard"],
    "docs/production/workers": ["sigterm"],
}

#: Titles in the navigation for pages whose own titles do not fit there.
_TITLES = {
    "../CHANGELOG": "Changelog",
    "../benchmarks/README": "Benchmarks",
    "../grafana/RUNBOOK": "Runbook",
}


def _pages(entries: str, named: set[str]) -> list[str]:
    """Return the pages of a group: the named pages, and all other pages of a folder for `folder/*`."""
    pages = []
    for entry in entries.split():
        folder = entry.removesuffix("*")
        written = sorted(f"{folder}{page.stem}" for page in (_DOCS / folder).glob("*.md"))
        pages += [page for page in written if page not in named] if entry.endswith("*") else [entry]
    return pages


def _titled(entry: str) -> str:
    """Return a line of the navigation for a page, with its title in the navigation if it has one."""
    return f"{_TITLES[entry]} <{entry}>" if entry in _TITLES else entry


def _contents() -> str:
    """Return the navigation as directives of Sphinx."""
    named = {root_doc.removeprefix("docs/"), *" ".join(_NAVIGATION.values()).split()}
    parts = []
    for caption, entries in _NAVIGATION.items():
        pages = map(_titled, _pages(entries, named))
        parts += ["", "```{toctree}", f":caption: {caption}", ":hidden:", "", *pages, "```"]
    return "\n".join(parts)


#: A link to a Markdown file.
_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:)[^)\s#]+\.md)(?:#[^)\s]*)?\)")


def _without_link(app: Sphinx, page: str, link: re.Match[str]) -> str:
    """Return a link to a page of the site unchanged; replace any other link by its text and the path in the repository."""
    target = (Path(app.srcdir) / page).parent / link[2]
    path = Path(os.path.normpath(target)).relative_to(app.srcdir)
    if path.with_suffix("").as_posix() in app.env.found_docs:
        return link[0]
    return f"{link[1]} (`{path}` in the repository)"


def _prepare(app: Sphinx, page: str, text: list[str]) -> None:
    """Adapt a page to the site: change links, and add the navigation, search words and dark pictures."""
    text[0] = _LINK.sub(lambda link: _without_link(app, page, link), text[0])
    if page == root_doc:
        text[0] = text[0].replace(_CARDS, "{.cards}\n" + _CARDS) + _contents()
    if page in _SEARCH_WORDS:
        entries = ", ".join(f"! {words}" for words in _SEARCH_WORDS[page])
        text[0] = _TITLE.sub(lambda title: f"{title[0]}\n```{{index}} {entries}\n```\n", text[0], count=1)
    text[0] = _LIGHT.sub(r"![\1](\2-light.png){.only-light}![\1](\2-dark.png){.only-dark}", text[0])


def setup(app: Sphinx) -> None:
    """Let Sphinx call `_prepare` for each page that it reads."""
    app.connect("source-read", _prepare)
