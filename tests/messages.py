"""
Collect the log lines and error texts of processes into a page for review: each text once, with its count.

`python -m tests.messages PAGE FOLDER` reads the `*.log` files in FOLDER. Chaos leaves them in its folder. Commands that tests start
leave them in the folder that RELIQ_TEST_LOGS names.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

#: A line of reliq's text format: time, process, level, logger, message.
LINE = re.compile(r"(?:\x1b\[\d+m)?\d{4}-\d\d-\d\dT\S+ \d+ ([A-Z]+) (\S+) (.*)")
#: The last line of a traceback: the exception's class and text.
ERROR = re.compile(r"((?:\w+\.)*[A-Z]\w+): (.+)")
#: Pattern of a part that differs from run to run -> its placeholder. The order matters.
VARYING = {
    r"\x1b\[\d+m": "",
    r"\|": "/",
    r"\d{4}-\d\d-\d\dT[\d:.+Z-]+": "TIME",
    r"\b\d+(\.\d+){3}:\d+|localhost:\d+": "ADDRESS",
    r"(?<=: message )[^:]+(?=: attempt)": "ID",
    r"(?<![\w.>}])/[\w.+-]+(/[\w.+-]*)*": "PATH",
    r"[\w./]+\.py:\d+( > [\w./]+\.py:\d+)*": "PLACE",
    r"\b(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w-]{10,}(\.\w+)*|\b(p\d+\.|evil~)\S*": "ID",
    r"\b\d[\d,]*(\.\d+)?(ms|s|m|h)?\b": "N",
    r"\bID( ?,? ID| ,| and N more)*": "ID",
}


def generalize(text: str) -> str:
    """Replace the parts of a text that differ from run to run by placeholders."""
    for pattern, placeholder in VARYING.items():
        text = re.sub(pattern, placeholder, text)
    return text


def count(lines: Iterable[str]) -> Counter[tuple[str, str, str]]:
    """Count the texts by level, logger and text; an exception in a traceback has its class as the logger."""
    found: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        if match := LINE.match(line):
            found[match[1], match[2], generalize(match[3])] += 1
        elif match := ERROR.match(line):
            found["traceback", match[1], generalize(match[2])] += 1
    return found


def messages(folder: Path) -> str:
    """Return the page of all messages in the log files of a folder."""
    files = sorted(folder.rglob("*.log"))
    found = count(line for file in files for line in file.read_text("utf-8", "replace").splitlines())
    rows = [f"| {number} | {level} | {logger} | {text} |" for (level, logger, text), number in sorted(found.items())]
    return "\n".join(["# Messages", "", "| count | level | logger | text |", "| ---: | --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(messages(Path(sys.argv[2])))
