"""
Build the API reference: replace each name that a page of docs/reference lists by its docstring.

The page has lines such as "- `reliq.Queue`". An alias has no docstring, so its line also contains its meaning. Docstrings are
plain text with `code` and the sections Args, Attributes, Raises, Returns and Example.
"""

import importlib
import inspect
import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ENTRY = re.compile(r"^- `(reliq\.[\w.]+)`(?:: (.+(?:\n  .+)*))?$", re.MULTILINE)
_SECTIONS = {"Args:": "Arguments", "Attributes:": "Attributes", "Raises:": "Raises", "Returns:": "Returns"}
_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = re.compile(r"[*|\\]|_(?!\w)")
_ITEM = re.compile(r"    ([\w, *]+): (.*)")

#: Internal attributes and methods of public classes, which the reference leaves out.
INTERNAL = {
    "reliq.Consumer": "around_calls, chosen, connection, deliveries, engine, error_hooks, handlers, "
    "is_leaving, leave, longest_grace, periodic, redis, running, ticked_beside, unfinished",
    "reliq.Counts": "sum",
    "reliq.Durability": "checked",
    "reliq.Layout": "is_in_one_slot, body_prefix",
    "reliq.Queue": "connection, known_shards, shards, ashards",
    "reliq.admin.Filter": "check, tester, letter_tester, chooses_end, span",
    "reliq.settings.Limits": "parse_rate, read, fields, declared",
}
#: A class whose methods another page documents -> the options of its directive.
DOCUMENTED_ELSEWHERE = {
    "reliq.admin.Admin": ["members:", "inherited-members: ReadOnlyAdmin"],
    "reliq.admin.AsyncAdmin": ["members: aclose"],
}
#: Classes that no user constructs: their arguments are left out.
NOT_MADE = {"reliq.Job", "reliq.ReceivedJob", "reliq.admin.Watcher", "reliq.Observer"}


def _directive(path: str, meaning: str) -> list[str]:
    """Return the directive that documents one name."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, Exception) else "class"
        inherited = (
            "show-inheritance:" if kind == "exception" else "inherited-members: object, dict, tuple, Struct, Protocol"
        )
        options = list(DOCUMENTED_ELSEWHERE.get(path, ["members:", inherited]))
        if path in INTERNAL:
            options.append(f"exclude-members: {INTERNAL[path]}")
        return [f".. auto{kind}:: {path}", *(f"   :{option}" for option in options)]
    if inspect.isfunction(value):
        return [f".. autofunction:: {path}"]
    shown = re.sub(r"\b(?:typing|datetime|collections\.abc|reliq[\w.]*)\.", "", repr(value))
    return [f".. py:data:: {path}", f"   :value: {shown}", "", f"   {_inline(meaning[:1].upper() + meaning[1:])}"]


def _entry(match: re.Match[str]) -> str:
    directive = _directive(match[1], " ".join((match[2] or "").split()))
    return "\n".join(["", "```{eval-rst}", *directive, "```", ""])


def _fill_page(_app: Sphinx, page: str, text: list[str]) -> None:
    """Replace the names on a page by directives, for which Sphinx inserts the docstrings."""
    if page.startswith("docs/reference/api"):
        text[0] = ENTRY.sub(_entry, text[0])


def _inline(text: str) -> str:
    """Return a text as reStructuredText in which only code is marked."""
    parts = _CODE.split(text)
    parts[::2] = [_SPECIAL.sub(r"\\\g<0>", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return "".join(parts)


def _section(title: str, body: list[str]) -> Iterator[str]:
    """Yield the lines of a section; lines such as `name: text` become a list of definitions."""
    yield from ("", f".. rubric:: {title}", "")
    joined: list[str] = []
    for line in body:
        if line.startswith("     ") and joined:
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    for line in joined:
        if title != "Returns" and (item := _ITEM.match(line)):
            yield from (", ".join(f"``{name}``" for name in item[1].split(", ")), f"    {_inline(item[2])}", "")
        else:
            yield from (_inline(line.strip()), "")


def _rewrite(_app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText."""
    text, *sections = re.split(r"(?m)^(?=(?:Args|Attributes|Raises|Returns|Example):)", "\n".join(lines))
    made = _inline(text).splitlines()
    for section in sections:
        title, *body = section.rstrip().splitlines()
        if title in _SECTIONS:
            made += _section(_SECTIONS[title], body)
        else:
            code = (
                [title.removeprefix("Example:").strip(" `")]
                if title != "Example:"
                else inspect.cleandoc("\n".join(["", *body])).splitlines()
            )
            made += ["", ".. rubric:: Example", "", ".. code-block:: python", "", *(f"    {line}" for line in code), ""]
    lines[:] = made


def _sign(_app: Sphinx, _what: str, name: str, *_rest: object) -> tuple[str, str] | None:
    """Leave out the arguments of a class that no user constructs."""
    return ("", "") if name in NOT_MADE else None


def _resolve(_app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.TextElement) -> nodes.Node | None:
    """Link a type to its public name in the reference; other types stay text."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    python = env.domains.python_domain
    for module in ("reliq", "reliq.admin", "reliq.testing", "reliq.settings", "reliq.events"):
        if f"{module}.{name}" in python.objects:
            return python.resolve_xref(env, node["refdoc"], env.app.builder, "obj", f"{module}.{name}", node, shown)
    return shown


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx call these functions for each page and docstring that it reads."""
    app.connect("source-read", _fill_page)
    app.connect("autodoc-process-docstring", _rewrite)
    app.connect("autodoc-process-signature", _sign)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
