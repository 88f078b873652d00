"""The reference lists every public name, command and setting of the code."""

import importlib.util
import re
from collections import Counter

from pages import ROOT

import reliq
import reliq.admin
import reliq.events
import reliq.testing
from reliq.cli.app import Commands
from reliq.cli.lazy import SHARED, is_shared

REFERENCE = ROOT / "docs" / "reference"
ENTRY = re.compile(r"^- `(reliq[\w.]*)\.(\w+)`(:?)", re.MULTILINE)


def made():
    spec = importlib.util.spec_from_file_location("reference_pages", REFERENCE / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PAGES


def named(prefix):
    """Return the names in the lists of the pages: module, name, and whether a meaning follows."""
    return [
        entry for page in sorted(REFERENCE.glob(f"{prefix}*.md")) for entry in ENTRY.findall(page.read_text("utf-8"))
    ]


def test_generated_pages_are_up_to_date():
    stale = [name for name, make in made().items() if (REFERENCE / name).read_text("utf-8") != make()]
    assert stale == [], "python docs/reference"


def test_page_of_commands_has_every_command_and_option():
    text = (REFERENCE / "cli.md").read_text("utf-8")
    sections = {head: body for head, _, body in (part.partition("\n") for part in text.split("\n### ")[1:])}

    for name in Commands.places:
        for part, command in getattr(Commands.load(name), "commands", {"": Commands.load(name)}).items():
            section = sections.pop(f"reliq {name} {part}".strip())
            shared = {one.name for one in command.params if is_shared(one)}
            options = {option for one in command.params for option in one.opts if option.startswith("--")}
            options -= {f"--{name}" for name in shared}
            assert {option for option in options if f"| `{option}" not in section} == set()
            assert {name for name in shared if f"`{SHARED[name][0]}`" not in section} == set()
    assert sections == {}


def test_reference_has_every_public_name_once_and_with_its_meaning():
    public = {f"{package.__name__}.{name}" for package in (reliq.admin, reliq.testing) for name in package.__all__}
    public |= {f"reliq.{name}" for name in reliq.__all__ if name not in reliq.admin.__all__}
    event = reliq.events.Event
    kinds = {
        name: value for name, value in vars(reliq.events).items() if isinstance(value, type) and value is not event
    }
    public |= {f"reliq.events.{name}" for name, value in kinds.items() if issubclass(value, event)}
    told = Counter(f"{module}.{name}" for module, name, _ in named("api"))

    assert public - set(told) == set()
    assert [name for name, times in told.items() if times > 1] == []
    for module, name, meaning in named("api"):
        value = getattr(importlib.import_module(module), name)
        assert meaning or value.__doc__, name
