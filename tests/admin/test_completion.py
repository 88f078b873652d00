"""What a shell completes: commands, options, and the names of queues, which are asked of Redis."""

import socket
import sys

import pytest

from reliq import Layout, Queue
from reliq.cli.app import main
from reliq.keys import QUEUES_KEY


@pytest.fixture
def completed(url, monkeypatch, capsys):
    """Complete the last of these words, as bash asks for it; return what it would offer, and what else is printed."""
    monkeypatch.setenv("RELIQ_URL", url)

    def complete(line):
        words = {"_RELIQ_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        for name, value in words.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["reliq"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.split()

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


def test_what_no_queue_is_called_is_left_out(completed, known, client):
    client.hset(QUEUES_KEY, "no name!", "1")

    assert completed("reliq show no") == []


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
