"""Shell completion of commands, options and queue names; queue names are read from Redis."""

import os
import random
import re
import shutil
import socket
import string
import sys

import pytest
from hostile import NAMES
from required import must_run_in_ci

from reliq import Layout, Queue
from reliq.cli.app import main
from reliq.keys import QUEUES_KEY

#: Reopens its terminal to make it the controlling terminal, which a shell needs.
ON_TERMINAL = ("sh", "-c", 'exec "$@" <"$(tty)"', "sh")
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"], "fish": ["fish", "-N", "-i"]}
#: The command, but with more time to read the names.
PATIENT = f"""#!{sys.executable}
import reliq.cli.options as options
from reliq.cli.app import main

options.COMPLETION_SECONDS = 100.0
main()
"""
every_shell = pytest.mark.parametrize("shell", SHELLS)


@pytest.fixture
def completed(url, monkeypatch, capsys):
    """Complete the last of these words as a shell does; return the completions."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.setattr("reliq.cli.options.COMPLETION_SECONDS", 100.0)

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
    """Queues in the queue registry."""
    for name in ("orders", "order-deadlines", "mails"):
        Queue(name, url=url).publish({})
    Queue("go", bytes, url=url, layout=Layout.hdt3213()).publish(b"x")


def test_queue_names_are_completed_where_a_command_takes_a_queue(completed, known):
    assert completed("reliq show ") == ["go", "mails", "order-deadlines", "orders"]
    assert completed("reliq list ord") == ["order-deadlines", "orders"]
    assert completed("reliq redrive orders --to ma") == ["mails"]
    assert completed("reliq worker shop.jobs --queue ma") == ["mails"]
    assert completed("reliq queues orders ord") == ["order-deadlines"], "an earlier word is not offered again"


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
def test_completion_of_hostile_queue_names_in_a_real_shell_runs_no_command(shell, known, client, terminal, tmp_path):
    """Tab lists the names; the next Tab completes a file, although the name contains a shell command."""
    if not shutil.which(shell):
        must_run_in_ci(f"{shell} is not installed (Debian: apt-get install {shell})")
    client.hset(QUEUES_KEY, mapping={r"hdt3213 x\$(touch ran)": "1", "hdt3213 evil;touch ran": "1"})
    (tmp_path / "evil-file").touch()
    program = tmp_path / "bin" / "reliq"
    program.parent.mkdir()
    program.write_text(PATIENT)
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    start = "autoload -Uz compinit; compinit -u -D; " if shell == "zsh" else ""
    typed = terminal(program=(*ON_TERMINAL, *SHELLS[shell]), folder=tmp_path, **environment)

    typed.type(f"{start}env _RELIQ_COMPLETE=source_{shell} reliq > s; source ./s; echo rea''dy\n")
    typed.wait_for_text("ready")
    typed.type("reliq show \t\t" if shell == "bash" else "reliq show \t")
    typed.wait_for_text("order-deadlines")
    typed.type("evi\t")
    typed.wait_for_text("evil-file|evil.?;")
    typed.type("\n")
    typed.wait_for_text("see reliq show --help")
    typed.type("exit\n")
    typed.end()

    assert not (tmp_path / "ran").exists(), typed.text


def test_completion_without_redis_or_with_a_url_in_a_file_offers_nothing(completed, known, url, tmp_path, monkeypatch):
    assert completed("reliq show --url redis://127.0.0.1:1/0 ") == [], "the URL of the line is the one"
    monkeypatch.setattr("reliq.cli.options.COMPLETION_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for away in ("redis://127.0.0.1:1/0", "no URL", f"redis://127.0.0.1:{silent.getsockname()[1]}/0"):
            monkeypatch.setenv("RELIQ_URL", away)
            assert completed("reliq show ") == []
    monkeypatch.delenv("RELIQ_URL")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.reliq]\nurl = {url!r}\n")
    assert completed("reliq show ") == []


def test_commands_options_and_their_words_are_completed(completed):
    assert "--header" in completed("reliq cancel orders --he")
    assert completed("reliq cancel orders --state re") == ["ready", "retry"]
    for shell in SHELLS:
        assert "doctor" in " ".join(completed("reliq do", shell))
