"""The README is the front caller: every snippet and command in it is run here, in its order, as it stands."""

import os
import re
import subprocess
import sys

import pytest
import redis
from pages import README, printed, programs

from reliq import Queue

TEXT = README.read_text("utf-8")


def typed_in(section):
    """The lines of a section that a person types."""
    return re.search(r"```sh\n(.*?)```", TEXT[TEXT.index(f"## {section}") :], re.DOTALL)[1].splitlines()


def test_all_programs_are_found():
    assert list(programs(README)) == ["shop/queues.py", "shop/jobs.py", "shop/web.py"]
    assert TEXT.count("```python") == 3


def test_the_first_queue_works_as_it_is_written(shop):
    run = shop(README)
    export, publish, work = typed_in("Your first queue")

    assert export.startswith("export RELIQ_URL=redis://")
    published = run(publish).splitlines()
    worked = run(work)

    assert published[0] == printed(programs(README)["shop/web.py"])[0]
    assert published[1].startswith("Counts(")
    # Threads of four processes print at once: text and line ends may come mixed.
    closed = sorted(int(number) for number in re.findall(r"order (\d+) is closed", worked))
    assert closed == list(range(1000))


def test_the_demo_balances_its_account_with_no_redis_given():
    environment = {name: value for name, value in os.environ.items() if name != "RELIQ_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "reliq", "demo", "--jobs", "1000"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "The account balances: nothing was lost." in done.stdout


def test_a_demo_on_a_redis_that_has_a_queue_of_that_name_is_refused(url, client: redis.Redis):
    Queue("demo", url=url).publish({})

    done = subprocess.run(
        [sys.executable, "-m", "reliq", "demo", "--url", url], check=False, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 2
    assert "the demo needs an empty one" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'reliq-queue[embedded]' && reliq demo",
        "pip install -e '.[dev]' && pytest",
        "reliq bench --quick --yes",
        "python examples/monitor.py",
    ],
)
def test_a_command_that_has_a_test_of_its_own_is_one_line(line):
    assert f"\n```sh\n{line}\n```\n" in TEXT
