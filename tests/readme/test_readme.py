"""The README is the front caller: every snippet and command in it is run here, in its order, as it stands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from typer.main import get_command

from reliq import Layout, Outgoing, Queue
from reliq.cli.app import app
from reliq.settings import HandlerSettings, QueueSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
SNIPPETS = {
    match[1]: match[0].removeprefix("```python\n").removesuffix("```")
    for match in re.finditer(r"```python\n# (shop/\w+\.py)\n.*?```", README, re.DOTALL)
}


@pytest.fixture
def shop(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """A folder with the README's snippets in it, and a way to run a command there."""
    for name, text in SNIPPETS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "RELIQ_URL": url}

    def run(*command: str, exits: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode in exits, done.stderr
        return done.stdout

    return run


def expected_output(name: str) -> list[str]:
    """What the comments behind a snippet's prints say."""
    return re.findall(r"print\(.*\)  # (\w+)$", SNIPPETS[name], re.MULTILINE)


def test_all_snippets_are_found():
    assert set(SNIPPETS) == {f"shop/{name}.py" for name in ("queues", "jobs", "web", "more", "bulk", "letters")}
    assert README.count("```python") == len(SNIPPETS)


def test_the_first_queue_works_as_it_is_written(shop):
    published = shop("shop.web").splitlines()
    worked = shop("reliq", "worker", "shop.jobs:consumer", "--processes", "4", "--concurrency", "16", "--burst=delayed")

    assert published[0] == expected_output("shop/web.py")[0]
    assert published[1].startswith("Counts(")
    # Threads of four processes print at once: text and line ends may come mixed.
    closed = sorted(int(number) for number in re.findall(r"order (\d+) is closed", worked))
    assert closed == list(range(1000))


def test_publishing_prints_what_the_comments_say(shop):
    printed = shop("shop.more").splitlines()

    assert printed[:5] == expected_output("shop/more.py")
    assert printed[5:] == ["Order(number=0) 1"]


def test_dead_letters_are_listed_and_redriven(shop, url):
    Queue("orders", dict[str, int], url=url).publish({"number": -1}, retries=0)
    shop("reliq", "worker", "shop.jobs:consumer", "--burst=delayed")

    printed = shop("shop.letters").splitlines()

    assert "rejected no such order 1" in printed[0]
    assert printed[1] == "1"


def test_a_batch_is_answered_for_each_message(shop, url):
    queue = Queue("orders", dict[str, int], url=url)
    queue.publish_many(Outgoing(body={"number": number}, retries=0) for number in (1, 2, 666))

    worked = shop("reliq", "worker", "shop.bulk:consumer", "--concurrency", "1", "--burst=delayed")

    assert "orders in one go" in worked
    counts = queue.counts()
    assert (counts.totals["acked"], counts.totals["nacked"], counts.dead) == (2, 1, 1)


OPERATED = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README[README.index("## Operating") :], re.DOTALL)
    for line in block.splitlines()
    if line.startswith("reliq ") and "bench" not in line
]


def test_the_commands_of_operating_run_as_they_are_written(shop, url):
    queue = Queue("orders", dict[str, int], url=url)
    queue.publish({"number": 42}, id="order-42")
    with queue.receive() as [job]:
        job.reject(reason="no route")
    assert queue.moves.collect(["order-42"], letters_max=10, letters_ms=10**9)
    queue.connection().wire(5.0).exchange([("HSET", "reliq:queues", "orders-old", "1")])
    assert len(OPERATED) >= 15

    for line in OPERATED:
        if line == "reliq watch":
            continue  # it has tests of its own, on a terminal: it ends when it is told to
        # A server with a known hole is found to be bad, and that is exit 1.
        shop(*shlex.split(line), exits=(0, 1) if line == "reliq doctor" else (0,))

    assert (queue.counts().ready, queue.counts().dead) == (1, 0)


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


@pytest.mark.parametrize("option", list(QueueSettings.__dataclass_fields__))
def test_every_queue_option_is_in_the_table(option):
    assert f"`{option}`" in README


@pytest.mark.parametrize("option", list(HandlerSettings.__dataclass_fields__))
def test_every_handler_option_is_in_the_table(option):
    assert f"`{option}`" in README


def test_every_worker_option_is_in_the_table():
    helped = subprocess.run(
        [sys.executable, "-m", "reliq", "worker", "--help"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    ).stdout

    options = set(re.findall(r"--[a-z][a-z-]+", helped)) - {"--help", "--install-completion", "--show-completion"}

    assert {option for option in options if f"`{option}`" not in README and f"`{option} " not in README} == set()


def defaults():
    """What the tables of options say of each."""
    column, found = 0, {}
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| option"):
            column = cells.index("default")
        elif line.startswith("| `") and len(cells) > column:
            found |= dict.fromkeys(re.findall(r"`([\w-]+)`", cells[0]), cells[column])
    return found


def test_the_defaults_of_the_tables_are_those_of_the_code():
    queue, handler, told = QueueSettings(), HandlerSettings(), defaults()
    days = f"{queue.letters_ttl / 86_400:g} days"
    worker = {option: one.default for one in get_command(app).commands["worker"].params for option in one.opts}

    assert [told[name] for name in ("retries", "ttl", "dedup", "history", "max_body", "letters_max")] == [
        f"{queue.retries}",
        f"{queue.ttl / 86_400:g} days",
        f"{queue.dedup:g} s",
        f"{queue.history}",
        f"{queue.max_body >> 20} MiB",
        f"{queue.letters_max:,}, {days}",
    ]
    assert [told[name] for name in ("lease", "timeout", "weight", "undecodable")] == [
        f"{handler.lease:g} s",
        f"{handler.timeout:g} s",
        f"{handler.weight}",
        f'`"{handler.undecodable}"`',
    ]
    for option in ("--processes", "--concurrency", "--grace", "--stall", "--log-level", "--log-format"):
        assert told[option] == f"{worker[option]}".removesuffix(".0")


def test_the_structures_of_the_table_are_those_of_the_code():
    keys = Queue("NAME", url="redis://127.0.0.1:1/0").keys

    for key in (keys.msg("ID"), keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.counts):
        assert f"`{key}`" in README
    assert Layout.RELIQ.hash_tag


def test_the_two_commands_are_one_line_each():
    assert "\npip install '.[embedded]' && reliq demo\n" in README
    assert "\npip install -e '.[dev]' && pytest\n" in README
