"""Some forty handlers do one bad thing each, beside two good queues: what becomes of them, and of the good ones."""

import threading
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager

import psutil
import pytest
import table
from ports import free_port
from waiting import eventually

#: What a queue keeps of messages that have ended: its dead letters, and its account.
KEPT = {"dead", "ends", "totals"}


@contextmanager
def published(deeds):
    """Publish good messages all the time; yield how many of each kind there are."""
    over, counts = threading.Event(), {"each": 0}

    def publish():
        while not over.wait(0.05):
            for queue in (deeds.GOOD, deeds.AGOOD):
                queue.publish_many(range(20))
            counts["each"] += 20

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


def misbehave(deeds, queue, deeds_of_it):
    """Publish every deed at once; return what waits for their ends and says which are not as the table has them."""
    ids = {name: queue.publish(name).id for name in deeds_of_it}

    def over():
        counts = queue.counts()
        return counts.alive == 0

    eventually(over, f"every deed of {queue.name} has ended")
    reasons = {letter.id: letter.reason for letter in queue.letters(limit=500)}
    ends = {name: reasons.get(id, "acked") for name, id in ids.items()}
    return {name: end for name, end in ends.items() if end not in deeds_of_it[name].ends}


def is_left(mark):
    """The processes that still run of all that was started with `mark` in the environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def mark(environment):
    """What tells everything that the workers of this test start."""
    environment["MARK"] = uuid.uuid4().hex
    return environment["MARK"]


def live(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def check_the_good(deeds, client, counts):
    """Every good message was worked, none is lost, and of none is anything left."""
    for queue in (deeds.GOOD, deeds.AGOOD):
        eventually(lambda queue=queue: queue.counts().alive == 0, f"{queue.name} is worked")
        found = queue.counts()
        assert (found.totals["acked"], found.dead, found.missing) == (counts["each"], 0, 0), queue.name


def check_nothing_is_left(client, mark, tmp_path):
    eventually(lambda: not is_left(mark), f"no process is left: {[one.cmdline() for one in is_left(mark)]}")
    left = {key.decode() for key in client.keys("{reliq:*") if key.decode().rpartition(":")[2] not in KEPT}
    assert {key for key in left if not (":lane:" in key or ":wake" in key or ":watch" in key)} == set()
    assert list(tmp_path.iterdir()) == []


def test_whatever_handlers_do_to_their_thread_or_loop_the_good_ones_go_on(worker, deeds, client, mark, tmp_path):
    port = free_port()
    process = worker(
        "--processes", "2", "--concurrency", "40", "--stall", "4", "--metrics-port", str(port), "--grace", "1"
    )
    with published(deeds) as counts:
        eventually(lambda: deeds.GOOD.counts().totals.get("acked"), "it works")
        wrong = {}
        bad = threading.Thread(target=lambda: wrong.update(misbehave(deeds, deeds.ASYNC, table.ASYNC)))
        bad.start()
        wrong |= misbehave(deeds, deeds.PLAIN, table.PLAIN)
        bad.join()
    assert wrong == {}
    check_the_good(deeds, client, counts)
    assert live(port) == 200

    process.process.terminate()

    assert process.wait(60) == 0
    check_nothing_is_left(client, mark, tmp_path)


def test_whatever_handlers_do_to_their_process_the_good_ones_go_on(worker, deeds, client, mark, tmp_path):
    port = free_port()
    process = worker(
        "--processes", "2", "--concurrency", "8", "--stall", "1.5", "--metrics-port", str(port), "--grace", "1"
    )
    with published(deeds) as counts:
        eventually(lambda: deeds.GOOD.counts().totals.get("acked"), "it works")
        wrong = misbehave(deeds, deeds.DEADLY, table.DEADLY)
    assert wrong == {}
    check_the_good(deeds, client, counts)
    assert live(port) == 200
    for text in ("ended with -11", "ended with 0", "ended with -6", "has held the interpreter"):
        assert process.said(text), text

    process.process.terminate()

    assert process.wait(60) == 0
    check_nothing_is_left(client, mark, tmp_path)
