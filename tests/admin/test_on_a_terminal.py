"""The commands on a real terminal: a confirmation, Ctrl-C, a progress bar."""

import signal
import sys

from handling import bury_all
from waiting import eventually

from reliq import Queue

#: A command that waits for each answer of Redis as long as a test does.
PATIENT = "import reliq.admin.session as one; one.REPLY_SECONDS = 600.0; from reliq.cli.app import main; main()"


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
            assert f"interrupted: {orders.counts().ready} redriven; run it again to continue" in redrive.text
        assert said in redrive.text

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


def test_second_ctrl_c_ends_a_purge_that_waits_for_redis(terminal, command, client, url):
    """The first one lets the running step end, which a Redis that does not answer never does."""
    orders = Queue("orders", url=url)
    orders.publish_many([{}] * 200)
    purge = terminal("purge", "orders", "--state", "ready", program=(sys.executable, "-c", PATIENT))
    purge.wait_for_text(r"Delete the ready messages of orders, all 200\?")
    client.client_pause(600_000, all=False)  # writes wait
    try:
        purge.type("y\n")
        purge.wait_for_text("looked at")
        eventually(lambda: any("b" in one["flags"] for one in client.client_list()), "Redis holds the purge up")

        assert end_by_many_ctrl_c(purge) == 130
    finally:
        client.client_unpause()
    assert "interrupted: nothing was deleted (the last step may not be counted); run it again to continue" in purge.text
    assert command("purge", "orders", "--state", "ready", "--yes").code == 0
    assert (orders.counts().alive, orders.counts().missing) == (0, 0)


def end_by_many_ctrl_c(terminal):
    """Send Ctrl-C until the command ends, because two that come too quickly count as one; return the exit code."""

    def press():
        terminal.process.send_signal(signal.SIGINT)
        return terminal.process.poll() is not None

    eventually(press, "Ctrl-C ends the command")
    return terminal.end()


def test_many_ctrl_c_end_a_redrive_with_its_result_and_no_traceback(terminal, url):
    orders = Queue("orders", url=url)
    orders.publish_many([{}] * 200)
    bury_all(orders)
    redrive = terminal("redrive", "orders", "--all", "--yes", "--rate", "10/s")
    eventually(lambda: orders.counts().ready > 0, "the first dead letters are published")

    assert end_by_many_ctrl_c(redrive) == 130
    assert "redriven" in redrive.text
    assert redrive.text.rstrip().endswith("run it again to continue")
    assert "Traceback" not in redrive.text
