"""The steps of examples/Dockerfile, and what its ignore file lets through."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "examples" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text("utf-8").splitlines()


def instructions():
    """Return every step in its order: (name, the rest of it), its lines joined."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    steps = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(step.split(maxsplit=1)[0], step.split(maxsplit=1)[1].strip()) for step in steps]


def stages():
    """Return the steps of each stage, its FROM first."""
    found = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def is_sent(path: str) -> bool:
    """Return whether the ignore file lets a path of the repository through: the last pattern that fits it decides."""
    sent = True
    for line in IGNORED:
        pattern = line.removeprefix("!").strip()
        if not pattern or pattern.startswith("#"):
            continue
        expression = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{expression}(?:/.*)?", path):
            sent = line.startswith("!")
    return sent


def copy(words, folder: Path):
    """Make a COPY step: its sources out of the context, into a folder."""
    *sources, _target = words
    for source in sources:
        files = [ROOT / source] if (ROOT / source).is_file() else sorted((ROOT / source).rglob("*"))
        names = [str(file.relative_to(ROOT)) for file in files if file.is_file()]
        sent = [name for name in names if is_sent(name)]
        if not sent:
            raise LookupError(f"COPY {source}: nothing of it is sent to the builder")
        for name in sent:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
