"""Names are the field's, one for each thing; comments and docstrings begin with a subject or a verb."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "reliq"

#: Names that had a better one in the field: no class, function, variable, attribute or parameter has them.
RETIRED = {
    "Flight",
    "Lookout",
    "Timekeeper",
    "Tidier",
    "Troubles",
    "Looker",
    "Look",
    "Sight",
    "Ground",
    "Acting",
    "Kept",
}
RETIRED |= {"Wish", "Terms", "Tally", "Plan", "Line", "Lines", "Room", "Source", "Turn", "TRY_SECONDS"}
RETIRED |= {"door", "doors", "flight", "flights", "lookout", "timekeeper", "tidier", "sight", "sights"}
#: The modules that had other names.
RETIRED_MODULES = {
    "doors",
    "flight",
    "lookout",
    "timekeeper",
    "tidier",
    "pieces",
    "existing",
    "acting",
    "alive",
    "reads",
}
RETIRED_MODULES |= {"accounting", "browsing", "inspecting", "bulk", "letters", "looks", "faults", "stateword", "uses"}

#: A comment or a docstring that begins so must be read twice.
OPENING = re.compile(r"(So|What|For so|Of|The most|Between)\b")
#: Parts whose comments and docstrings are not yet all in that form.
STILL_OPENED: set[str] = set()

#: Turns of phrase that hide who does what.
PHRASES = re.compile(
    r"asked for wrongly|is told by the|\b(is|are|was|were) told (of|by)\b|\bfor so long\b|ever so\b|for who (asks|may)"
    r"|says of itself|as it is before|nobody could tell|the rest goes the way|reliq_heartbeat_late_total|late heartbeat",
    re.IGNORECASE,
)

#: Classes of one name in two modules, with the reason.
TWICE = {"Claimed", "Published"}  # a message that was claimed or published, and the event that says so


@cache
def modules():
    """Path -> text and tree of every module."""
    texts = {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def sentences_in(text, tree):
    """The docstrings, and the comments that stand on lines of their own, each block once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 or token.string.startswith("#:"):
                yield token.string.lstrip("#: ")
            last = token.start[0]


def defined():
    """Names that modules define: constants and classes, each with the modules that do."""
    constants, classes = defaultdict(set), defaultdict(set)
    for path, (_, tree) in modules().items():
        for node in tree.body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for name in (
                one.id for target in targets if target for one in ast.walk(target) if isinstance(one, ast.Name)
            ):
                if name.isupper() and len(name) > 1 and not name.startswith("_"):
                    constants[name].add(path)
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(path)
    return constants, classes


def test_no_retired_name_has_come_back():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, (_, tree) in modules().items()
        for name in names_in(tree)
        if name.lstrip("_") in RETIRED
    }

    assert found == set()


def test_no_module_has_a_retired_name():
    assert {path.stem for path in modules()} & RETIRED_MODULES == set()


def test_a_comment_or_a_docstring_begins_with_a_subject_or_a_verb():
    found = [
        f"{path.relative_to(PACKAGE)}: {sentence[:70]}"
        for path, (text, tree) in modules().items()
        for sentence in sentences_in(text, tree)
        if OPENING.match(sentence) and path.relative_to(PACKAGE).parts[0] not in STILL_OPENED
    ]

    assert found == []


def test_a_page_or_a_module_says_who_does_what():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text("utf-8") for page in pages} | {path: text for path, (text, _) in modules().items()}

    found = [
        f"{path.relative_to(ROOT)}: {phrase[0]}" for path, text in texts.items() for phrase in PHRASES.finditer(text)
    ]

    assert found == []


def test_a_constant_has_one_module_and_a_class_has_one():
    constants, classes = defined()

    assert {name for name, paths in constants.items() if len(paths) > 1} == set()
    assert {name for name, paths in classes.items() if len(paths) > 1} == TWICE


def test_the_test_sees_an_opening_in_a_comment_and_in_a_docstring():
    text = '"""What this is."""\n#: So many.\nx = 1\n# A comment\n# Of two lines.\n'

    openings = [one for one in sentences_in(text, ast.parse(text)) if OPENING.match(one)]

    assert openings == ["What this is.", "So many."]
