"""The commands on a real terminal: a confirmation, Ctrl-C, a progress bar."""

import signal

from handling import bury_all
from waiting import eventually

from reliq import Queue


def test_redrive_asks_first_and_an_interrupted_redrive_can_be_continued(terminal, command, url):
    orders = Queue("orders", url=url)
    orders.publish_many([{}] * 200)
    bury_all(orders)

    for answer, said in (("n", ""), ("y", "interrupted: ")):
        redrive = terminal("redrive", "orders", "--all", "--rate", "10/s")
        redrive.wait_for_text(r"Redrive the dead letters of orders, all 200\?")
        redrive.type(f"{answer}\n")
        if answer == "n":
            assert redrive.end() != 0
            assert orders.counts().dead == 200
        else:
            eventually(lambda: orders.counts().ready > 0, "the first dead letters are published")
            assert redrive.end(signal.SIGINT) == 130
        assert said in redrive.text

    assert "redriven; run it again to go on" in redrive.text
    counts = orders.counts()
    assert 0 < counts.ready < 200
    assert (counts.ready + counts.dead, counts.missing) == (200, 0)
    assert command("redrive", "orders", "--all", "--yes").code == 0
    assert orders.counts().ready == 200


def test_bulk_publish_shows_a_progress_bar_on_a_terminal(terminal, url, tmp_path):
    file = tmp_path / "orders.jsonl"
    file.write_text('{"n":1}\n' * 2000)

    publish = terminal("publish", "orders", "--jsonl", str(file))

    assert publish.end() == 0
    assert b"\x1b[" in publish.raw
    assert "looked at" in publish.text
    assert publish.text.splitlines()[-1] == "2000 published, 0 were before"
    assert Queue("orders", url=url).counts().ready == 2000
