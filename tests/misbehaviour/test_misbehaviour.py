"""Some thirty handlers misbehave in one way each, beside two good queues that are not affected."""

import uuid

import psutil
import pytest
import table
from good import GoodWork
from ports import free_port
from waiting import eventually

pytestmark = pytest.mark.slow

#: Redis keys that a queue keeps when all messages have ended: dead letters, account, and wake token.
KEPT = {"dead", "ends", "token", "totals", "wake"}
#: Repetitions of the quick misbehaviours: a leak in each of them exceeds the noise.
TIMES = 4
#: The noise: connections for parts of the worker that call at the same time, and a timer of the log limit.
CONNECTIONS, TIMERS = 2, 1
SLOTS = 16


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def mark(environment):
    """An environment variable that marks all processes started by the workers of this test."""
    environment["MARK"] = uuid.uuid4().hex
    return environment["MARK"]


@pytest.fixture
def good(deeds, port):
    """Publish and handle good messages all the time, from the first handled message on."""
    with GoodWork((deeds.GOOD, deeds.AGOOD), port) as good:
        yield good


def publish(deeds):
    """Publish the name of each deed, queue -> table; return the id, the queue and the deed of each."""
    return {name: (queue.publish(name).id, queue, deed) for queue, all in deeds.items() for name, deed in all.items()}


def check_the_ends(published):
    """Wait until all messages have ended; each as the table expects."""
    queues = {queue for _, queue, _ in published.values()}
    for queue in queues:
        eventually(lambda queue=queue: queue.counts().alive == 0, f"every deed of {queue.name} has ended")
    reasons = {letter.id: letter.reason for queue in queues for letter in queue.dead_letters(limit=500)}
    ends = {name: reasons.get(id, "acked") for name, (id, _, _) in published.items()}
    assert {name: end for name, end in ends.items() if end not in published[name][2].ends} == {}


def check_the_log(process, published):
    """Expect each dead letter in the log with its id and the text from the table."""
    dead = {letter.id for _, queue, _ in published.values() for letter in queue.dead_letters(limit=500)}
    wanted = {name: [*([id] if id in dead else []), deed.says] for name, (id, _, deed) in published.items()}
    silent = {name: text for name, texts in wanted.items() for text in texts if not process.said(text)}
    assert silent == {}


def check_the_good(good):
    """All good messages were handled, none is lost, and a liveness probe would not have restarted the worker."""
    for queue, published in good.published.items():
        eventually(lambda queue=queue: queue.counts().alive == 0, f"{queue.name} is worked")
        found = queue.counts()
        assert (found.totals["acked"], found.dead, found.missing) == (published, 0, 0), queue.name
    assert good.live[-1][0] == 200
    assert {
        text
        for status, text in good.live
        if status not in (0, 200) and "one of its parts stopped unexpectedly" not in text
    } == set()


def check_nothing_is_left(client, process, mark, tmp_path):
    eventually(lambda: not is_left(mark), f"no process is left: {[one.cmdline() for one in is_left(mark)]}")
    eventually(lambda: process.output_ended, "no process is left that has the output of the worker open")
    left = {key.decode(): client.ttl(key) for key in client.scan_iter("{reliq:*")}
    assert {key for key, ttl in left.items() if ttl == -1 and key.rpartition(":")[2] not in KEPT} == set()
    assert list(tmp_path.iterdir()) == []


def is_left(mark):
    """Return the running processes with `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def held(process):
    """Return the numbers of descriptors and threads of a process."""
    return process.num_fds(), process.num_threads()


def check_nothing_has_grown(process, before, *, descriptors=0, threads=0):
    """Wait until the process has at most `more` descriptors and threads more than `before`."""

    def what_it_has():
        return f"{held(process)}, before {before}: {process.open_files()} {process.net_connections()}"

    eventually(
        lambda: all(
            now <= most for now, most in zip(held(process), (before[0] + descriptors, before[1] + threads), strict=True)
        ),
        f"descriptors and threads are given back: {what_it_has()}",
    )


def have_every_thread_started(deeds, client):
    """Run a handler in every slot once, so that later growth can only come from leaks."""
    deeds.WAITING.publish_many(["bell"] * SLOTS)
    eventually(lambda: client.hlen("started") == SLOTS, "every slot has its thread")
    client.rpush("bell", *range(SLOTS))


def test_misdeeds_in_a_thread_or_loop_stop_no_good_handler(worker, deeds, client, mark, tmp_path, port, good):
    process = worker("--concurrency", str(SLOTS), "--metrics-port", str(port), "--grace", "1")
    have_every_thread_started(deeds, client)
    (child,) = process.children()
    quick = {deeds.PLAIN: table.PLAIN, deeds.ASYNC: table.ASYNC}

    first = publish({deeds.SLOW: table.SLOW} | quick)
    check_the_ends(first)
    good.check_they_go_on("all of them, the first time")
    before = held(child)
    for again in [publish(quick) for _ in range(TIMES)]:
        check_the_ends(again)
    check_the_ends(publish({deeds.PLAIN: table.LASTING}))
    good.check_they_go_on("the quick ones, again and again")
    # `leaves a thread behind` leaves a thread each time.
    check_nothing_has_grown(child, before, descriptors=CONNECTIONS, threads=TIMES + TIMERS)
    good.__exit__()
    check_the_good(good)
    assert process.children() == [child]

    process.process.terminate()

    assert process.wait(60) == 0
    check_the_log(process, first)
    check_nothing_is_left(client, process, mark, tmp_path)


@pytest.mark.parametrize("part", [0, 1], ids=["one half", "the other half"])
def test_misdeeds_to_a_process_stop_no_good_handler(worker, deeds, client, mark, tmp_path, port, good, part):
    process = worker("--concurrency", str(SLOTS), "--gil-timeout", "5", "--metrics-port", str(port), "--grace", "1")
    supervisor = psutil.Process(process.process.pid)
    before, done = (), {}
    tables = {deeds.DEADLY: table.DEADLY, deeds.DEADLY_ASYNC: table.DEADLY_ASYNC}

    for queue, name, deed in [(queue, *row) for queue, rows in tables.items() for row in rows.items()][part::2]:
        children = process.children()
        one = publish({queue: {name: deed}})
        check_the_ends(one)
        if deed.ends == table.LEASE and deed.says:
            eventually(
                lambda children=children: not set(children) & set(process.children()), f"its process ends: {name}"
            )
        good.check_they_go_on(name)
        done |= one
        before = before or held(supervisor)  # with the connection for the first death
    check_nothing_has_grown(supervisor, before)
    good.__exit__()
    check_the_good(good)

    process.process.terminate()

    assert process.wait(60) == 0
    check_the_log(process, done)
    check_nothing_is_left(client, process, mark, tmp_path)
