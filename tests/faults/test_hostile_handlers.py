"""Whatever a handler does to its thread, its loop or its process: the others work, and it ends in the dead letters."""

from waiting import eventually

ENDS_PROCESSES = ("segfaults", "calls os._exit")


def test_handlers_that_kill_their_process_or_thread_end_as_letters_and_take_nothing_along(worker, faulty):
    for deed in faulty.DEADLY:
        faulty.DEEDS.publish(deed, retries=0 if deed in ENDS_PROCESSES else 2)
    faulty.DEEDS.publish_many(["good"] * 100, chunk=10)

    process = worker("--queue", "deeds", "--concurrency", "4", "--burst=delayed", "--log-level", "error")

    assert process.wait(150) == 0
    counts = faulty.DEEDS.counts()
    assert (counts.totals["acked"], counts.dead, counts.missing) == (100, 4, 0)
    assert {letter.payload.decode() for letter in faulty.DEEDS.letters()} == set(faulty.DEADLY)
    reasons = {letter.payload.decode(): letter.reason for letter in faulty.DEEDS.letters()}
    assert {reasons[deed] for deed in ENDS_PROCESSES} == {"lease"}


def test_a_handler_that_holds_the_interpreter_for_two_seconds_keeps_its_lease_and_those_beside_it(
    worker, faulty, admin
):
    faulty.HELD.publish(2.0)
    faulty.HELD.publish(0.1)

    process = worker("--queue", "held", "--concurrency", "2", "--burst=delayed")

    assert process.wait() == 0
    totals = faulty.HELD.counts().totals
    assert (totals["claimed"], totals["acked"]) == (2, 2)
    assert set(admin.hvals("note:started")) == {b"1"}


def test_a_worker_goes_on_beside_a_handler_that_holds_the_interpreter(worker, faulty, admin):
    faulty.HELD.publish(2.0)
    process = worker("--concurrency", "4")
    eventually(lambda: admin.hlen("note:started") == 1, "the handler holds the interpreter")

    faulty.COUNTED.publish_many(range(50))

    eventually(lambda: faulty.COUNTED.counts().totals.get("acked") == 50, "the others are worked")
    eventually(lambda: faulty.HELD.counts().totals.get("acked") == 1, "and so is the one that held them up")
    assert len(process.children()) == 1
