"""What a shell completes: commands, options, and the names of queues, which are asked of Redis."""

import os
import random
import re
import shutil
import socket
import string
import sys
from pathlib import Path

import pytest
from hostile import NAMES
from required import must_run_in_ci
from session import Session

from reliq import Layout, Queue
from reliq.cli.app import main
from reliq.keys import QUEUES_KEY

#: Opens its terminal anew, which makes it the controlling one: a shell wants that.
ON_TERMINAL = ("sh", "-c", 'exec "$@" <"$(tty)"', "sh")
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"], "fish": ["fish", "-N", "-i"]}
every_shell = pytest.mark.parametrize("shell", SHELLS)


@pytest.fixture
def completed(url, monkeypatch, capsys):
    """Complete the last of these words, as a shell asks for it; return the words offered, checked to be nothing else."""
    monkeypatch.setenv("RELIQ_URL", url)

    def complete(line, shell="bash"):
        words = {"_RELIQ_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        words |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        for name, value in words.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["reliq"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        if shell == "zsh":
            text = re.fullmatch(r"_arguments '\*: :\(\((.*)\)\)'\n", captured.out, re.DOTALL)[1]
            return [re.fullmatch('"(.*)"', one)[1] for one in text.splitlines()]
        return [one for one in captured.out.splitlines() if one]

    return complete


@pytest.fixture
def known(url):
    """Queues that the registry names."""
    for name in ("orders", "order-deadlines", "mails"):
        Queue(name, url=url).publish({})
    Queue("go", bytes, url=url, layout=Layout.hdt3213()).publish(b"x")


def test_the_names_of_queues_are_completed_where_one_is_wanted(completed, known):
    assert completed("reliq show ") == ["go", "mails", "order-deadlines", "orders"]
    assert completed("reliq list ord") == ["order-deadlines", "orders"]
    assert completed("reliq dead redrive orders --to ma") == ["mails"]
    assert completed("reliq worker shop.jobs --queue ma") == ["mails"]


def test_a_queue_that_is_named_already_is_not_offered_again(completed, known):
    assert completed("reliq queues orders ord") == ["order-deadlines"]


def test_names_are_of_the_redis_that_the_line_names(completed, known):
    assert completed("reliq show --url redis://127.0.0.1:1/0 ") == []


@every_shell
def test_completion_of_random_queue_names_offers_only_plain_names(shell, completed, known, client):
    chosen = random.Random(shell)
    names = ["".join(chosen.choices(string.printable + "\x00é\u202e", k=chosen.randint(1, 6))) for _ in range(900)]
    client.hset(QUEUES_KEY, mapping=dict.fromkeys([f"hdt3213 {name}" for name in names + NAMES], "1"))

    offered = completed("reliq show ", shell)

    plain = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")
    assert [name for name in offered if not plain.fullmatch(name)] == []
    assert {"go", "mails", "orders", *filter(plain.fullmatch, names)} <= {*offered}


@every_shell
def test_completion_of_hostile_queue_names_in_a_real_shell_runs_no_command(shell, known, client, url, tmp_path):
    """Tab lists the names; the next Tab completes a file where a queue's name would have run a command."""
    if not shutil.which(shell):
        must_run_in_ci(f"{shell} is not installed (Debian: apt-get install {shell})")
    client.hset(QUEUES_KEY, mapping={r"hdt3213 x\$(touch ran)": "1", "hdt3213 evil;touch ran": "1"})
    (tmp_path / "evil-file").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "RELIQ_URL": url, "LANG": "C.UTF-8"}
    session = Session(program=(*ON_TERMINAL, *SHELLS[shell]), environment=environment, folder=tmp_path)
    try:
        start = "autoload -Uz compinit; compinit -u -D; " if shell == "zsh" else ""
        session.type(f"{start}env _RELIQ_COMPLETE=source_{shell} reliq > s; source ./s; echo rea''dy\n")
        session.wait_for("ready")
        session.type("reliq show \t\t" if shell == "bash" else "reliq show \t")
        session.wait_for("order-deadlines")
        session.type("evi\t")
        session.wait_for("evil-file|evil.?;")
        session.type("\n")
        session.wait_for("see reliq show --help")
        session.type("exit\n")
        session.end()
    finally:
        session.close()

    assert not (tmp_path / "ran").exists(), session.text


def test_completion_reads_no_url_from_a_file(completed, known, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.reliq]\nurl = {url!r}\n")
    monkeypatch.delenv("RELIQ_URL")

    assert completed("reliq show ") == []


def test_nothing_is_offered_and_nothing_printed_while_redis_is_away_or_says_nothing(completed, known, monkeypatch):
    monkeypatch.setenv("RELIQ_URL", "redis://127.0.0.1:1/0")
    assert completed("reliq show ") == []
    monkeypatch.setenv("RELIQ_URL", "no URL")
    assert completed("reliq show ") == []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RELIQ_URL", f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        assert completed("reliq show ") == []


def test_without_a_redis_named_nothing_is_offered(completed, monkeypatch):
    monkeypatch.delenv("RELIQ_URL")

    assert completed("reliq show ") == []


def test_the_options_of_a_command_and_the_words_of_an_option_are_completed(completed):
    assert "--header" in completed("reliq cancel orders --he")
    assert completed("reliq cancel orders --state re") == ["ready", "retry"]
