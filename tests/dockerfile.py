"""
Run the steps of examples/Dockerfile that do not need Docker, on this machine, below a folder.

    python tests/dockerfile.py FOLDER

Copy the files that the Dockerfile copies and the ignore file allows, run the RUN steps of the first stage as written,
and print the skipped steps. The steps install packages from PyPI.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "examples" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text("utf-8").splitlines()


def instructions():
    """Return all steps in order as (name, arguments), with continuation lines joined."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    steps = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(step.split(maxsplit=1)[0], step.split(maxsplit=1)[1].strip()) for step in steps]


def stages():
    """Return the steps of each stage, starting with FROM."""
    found = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def is_sent(path: str) -> bool:
    """Return whether Docker sends a file of this path: the last matching pattern of the ignore file decides."""
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
    """Run a COPY step: copy its sources from the context into a folder."""
    *sources, _target = words
    for source in sources:
        files = [ROOT / source] if (ROOT / source).is_file() else sorted((ROOT / source).rglob("*"))
        names = [str(file.relative_to(ROOT)) for file in files if file.is_file()]
        sent = [name for name in names if is_sent(name)]
        if not sent:
            raise SystemExit(f"COPY {source}: nothing of it is sent to the builder")
        for name in sent:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run(command: str, folder: Path):
    """Run a RUN step in the folder's /src; all folders of the image are below the folder."""
    command = re.sub(r"--mount=\S+ ", "", command)
    command = re.sub(r"(?<![\w.])/(src|wheels|venv)\b", rf"{folder}/\1", command)
    print("RUN", command, flush=True)
    subprocess.run(["sh", "-c", command], cwd=folder / "src", check=True)


def main(folder: Path):
    """Build the image's files and run the result."""
    first, last = stages()
    for name, rest in first:
        if name == "COPY":
            copy(rest.split(), folder / "src")
        elif name == "RUN":
            run(rest, folder)
    for name, rest in last:
        print("not run:", name, rest)
    reliq = folder / "venv" / "bin" / "reliq"
    subprocess.run([reliq, "--version"], cwd=folder, check=True)
    (probe,) = [json.loads(rest.partition("CMD ")[2]) for name, rest in last if name == "HEALTHCHECK"]
    asked = subprocess.run([reliq, *probe[1:]], cwd=folder, capture_output=True, text=True, check=False)
    if (asked.returncode, "no answer" in asked.stderr) != (1, True):
        raise SystemExit(f"{probe} without a worker: exit {asked.returncode}, {asked.stderr}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
