"""The README's picture of `reliq watch` can be drawn anew, from a real run."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_picture_is_drawn_from_a_real_run(tmp_path):
    picture = tmp_path / "watch.svg"

    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "watch_picture.py"), str(picture), "3"],
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{picture} shows 3 queues and 1 worker.\n"
    words = "".join(ET.parse(picture).getroot().itertext()).replace("\xa0", " ")
    assert "orders" in words
    assert "workers and what they run" in words
