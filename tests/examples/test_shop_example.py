"""The shop of examples/shop: its own tests pass, and its story comes to its end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(*words, **environment):
    """Run Python in the folder of the examples, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=EXAMPLES,
        env={name: value for name, value in os.environ.items() if name != "RELIQ_URL"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests_of_the_shop_pass_in_two_processes():
    plugins = [part for name in ("xdist", "reliq.testing.plugin") for part in ("-p", name)]

    said = ran("-m", "pytest", "shop", "-q", "-n", "2", *plugins, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


def test_shop_closes_unpaid_orders_and_sends_each_mail_once():
    said = ran(str(EXAMPLES / "shop"))

    ends = dict(re.findall(r"In the end order (\d) is (\w+)\.", said))
    assert ends == {"1": "paid", "2": "closed", "3": "closed", "4": "paid", "5": "closed", "6": "closed"}
    assert "13 mails were sent, each once." in said
    assert "Account of shop.closing: 6 published = 4 acked, 2 cancelled, 0 expired, 0 dead, 0 alive; 0 missing." in said
