"""The examples are complete programs: they run, print their output, and their accounts balance."""

import os
import re
from pathlib import Path

import pytest
from programs import python

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
ACCOUNT = re.compile(
    r"Account of \S+: (\d+) published = (\d+) acked, (\d+) cancelled, (\d+) expired, (\d+) dead, (\d+) alive; (\d+) missing\."
)


@pytest.fixture
def run(url):
    """Run an example on the server under test; return its output and its account."""

    def make(name, *arguments, change=""):
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "error", "RELIQ_URL": url}
        changed = f"import {Path(name).stem} as example; {change}; example.main()"
        program = ["-c", changed] if change else [EXAMPLES / name]
        done = python(*program, *arguments, cwd=EXAMPLES, env=environment)
        assert done.returncode == 0, done.stderr
        account = ACCOUNT.search(done.stdout)
        assert account, done.stdout
        return done.stdout, tuple(int(number) for number in account.groups())

    return make


def test_webhooks_are_delivered_retried_or_become_dead_letters(run):
    told, account = run("webhooks.py", change="example.ANSWER_SECONDS = 4.0")  # slow replies are no failures

    assert account == (5, 3, 0, 0, 2, 0, 0)
    assert "after a minute `reliq delete webhooks --letters` removes it" in told
    for line in (
        "to-well: delivered at attempt 1 (HTTP 200)",
        "to-recovers: delivered at attempt 3 (HTTP 200)",
        "to-hangs: delivered at attempt 3 (HTTP 200)",
        "to-moved-away: dead letter after 1 attempts, rejected: the receiver refuses it: HTTP 410",
        "to-broken: dead letter after 5 attempts, failed: HTTPError: HTTP Error 500: Internal Server Error",
    ):
        assert line in told


def test_newsletter_of_one_tenant_does_not_delay_mail_of_others(run):
    told, account = run("tenants.py")

    assert account == (66, 66, 0, 0, 0, 0, 0)
    assert int(re.search(r"quiet tenant went out as number (\d+) of 66", told)[1]) <= 30
    assert int(re.search(r"At most (\d+) mails of one tenant", told)[1]) <= 2


def ran_without_url(*words, **environment):
    """Run Python in the folder of the examples; return its output."""
    own = {name: value for name, value in os.environ.items() if name != "RELIQ_URL"} | environment
    done = python(*words, cwd=EXAMPLES, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests_of_the_shop_pass_in_two_processes():
    # Without a cache: test_wheel.py copies this folder, perhaps at the same time.
    names = ("xdist", "reliq.testing.plugin", "no:cacheprovider")
    plugins = [part for name in names for part in ("-p", name)]

    said = ran_without_url("-m", "pytest", "shop", "-q", "-n", "2", *plugins, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


def test_shop_closes_unpaid_orders_and_sends_each_mail_once():
    said = ran_without_url(EXAMPLES / "shop", SHOP_PAY_WITHIN="12")  # a busy machine pays in time too

    ends = dict(re.findall(r"In the end order (\d) is (\w+)\.", said))
    assert ends == {"1": "paid", "2": "closed", "3": "closed", "4": "paid", "5": "closed", "6": "closed"}
    assert "13 mails were sent, each once." in said
    assert "Account of shop.closing: 6 published = 4 acked, 2 cancelled, 0 expired, 0 dead, 0 alive; 0 missing." in said
