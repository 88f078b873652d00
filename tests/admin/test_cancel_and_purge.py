"""`reliq cancel` and `reliq purge`: by id, by header and by text, in every state; the account balances."""

import pytest

from reliq import Admin, Queue
from reliq.transitions import CallNumber

STATES = ("pending", "ready", "retry", "unack", "garbage")


@pytest.fixture(autouse=True)
def the_account_balances(queue):
    yield
    assert queue.counts().missing == 0


@pytest.fixture
def fill(queue):
    """Put six messages into a state; those with even numbers belong to acme."""

    def make(state, number=6):
        ids = [f"m{at}" for at in range(number)]
        for at, id in enumerate(ids):
            delay = 600 + at if state == "pending" else 0
            queue.publish({"n": at}, id=id, delay=delay, headers={"tenant": "acme" if at % 2 == 0 else "bits"})
        if state in ("pending", "ready"):
            return ids
        claimed = queue.moves.claim(CallNumber("w", 1), limit=number, lease_ms=60_000).claimed
        if state == "unack":
            queue.moves.nack([(one, 60_000, "failed 1 x", b"") for one in claimed])
        elif state == "retry":
            queue.moves.nack([(one, 0, "failed 1 x", b"") for one in claimed])
            while queue.counts().retry < number:
                queue.moves.reclaim()
        else:
            queue.moves.nack(
                [
                    (
                        one,
                        0,
                        "rejected 1 x",
                        b'RELIQ/1 {"d":1,"r":1,"h":{"tenant":"%s"}}\n{"n":%d}'
                        % (b"acme" if at % 2 == 0 else b"bits", at),
                    )
                    for at, one in enumerate(claimed)
                ]
            )
        return ids

    return make


def left(queue, command, state):
    """Ids of a state that a worker would still get."""
    found = command("list", queue.name, "--state", state, "--limit", 1000, "--json").json
    return sorted(one["id"] for one in found if one["mark"] != "cancelled")


def work(queue):
    """Handle what can be claimed; return the numbers."""
    numbers = []
    while True:
        with queue.receive(limit=100) as jobs:
            numbers += [job.body["n"] for job in jobs]
        if not jobs:
            return numbers


# ---- cancel -----------------------------------------------------------------


def test_ids_are_cancelled_and_an_unknown_one_is_said(command, queue):
    queue.publish({"n": 1}, id="runs")
    queue.moves.claim(CallNumber("w", 1), limit=1, lease_ms=60_000)
    queue.publish({"n": 2}, id="waits")
    queue.publish({"n": 3}, id="stays")

    ran = command("cancel", "q", "waits", "runs", "nobody")

    assert ran.code == 2
    assert ran.out.splitlines() == ["cancelled waits", "running runs", "not_found nobody"]
    assert work(queue) == [3]
    again = command("cancel", "q", "runs", "--json")
    assert (again.code, again.json) == (0, {"runs": "running"})


@pytest.mark.parametrize("state", ["pending", "ready", "retry", "unack"])
def test_those_of_a_state_that_match_are_cancelled(state, fill, command, queue):
    fill(state)
    match = ("--state", state, "--header", "tenant=acme")

    dry = command("cancel", "q", *match, "--dry-run")
    ran = command("cancel", "q", *match, "--yes")

    assert (dry.code, dry.out) == (0, "3 would be cancelled\n")
    assert (ran.code, ran.out) == (0, "3 cancelled\n")
    assert left(queue, command, state) == ["m1", "m3", "m5"]
    work(queue)
    assert queue.counts().totals["cancelled"] == 3


# ---- purge ------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_whole_state_is_purged(state, fill, command, queue):
    fill(state)

    dry = command("purge", "q", "--state", state, "--dry-run")
    before = queue.counts()
    ran = command("purge", "q", "--state", state, "--yes")

    assert (dry.out, before.alive) == ("6 would be deleted\n", 6)
    assert (ran.code, ran.out) == (0, "6 deleted\n")
    counts = queue.counts()
    assert counts.alive == 0
    kind = "cancelled" if state == "unack" else "purged"
    assert counts.totals[kind] == 6


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", [("--match", '"n":3'), ("--header", "tenant=acme", "--match", '"n":4')])
def test_one_message_in_the_middle_is_purged(state, how, fill, command, queue):
    ids = fill(state)
    meant = "m3" if how[0] == "--match" else "m4"

    ran = command("purge", "q", "--state", state, *how, "--yes", "--json")

    assert ran.code == 0
    assert ran.json["found"] == ran.json["purged"] + ran.json["cancelled"] == 1
    assert left(queue, command, state) == sorted(set(ids) - {meant})
    handled = work(queue)
    assert int(meant[1:]) not in handled
    totals = queue.counts().totals
    assert totals.get("purged", 0) + totals.get("cancelled", 0) == 1


def test_what_is_purged_in_the_middle_of_a_list_frees_its_body_and_is_counted_once(fill, command, queue, client):
    fill("ready")

    command("purge", "q", "--state", "ready", "--match", '"n":3', "--yes")

    assert not client.exists(queue.keys.msg("m3"))
    assert queue.counts().ready == 6
    assert sorted(work(queue)) == [0, 1, 2, 4, 5]
    counts = queue.counts()
    assert (counts.alive, counts.totals["cancelled"], counts.totals.get("purged", 0)) == (0, 1, 0)


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_many_are_purged_in_many_steps(state, command, queue, fill):
    fill(state, 800)

    matched = command("purge", "q", "--state", state, "--header", "tenant=bits", "--yes", "--json").json
    rest = command("purge", "q", "--state", state, "--yes", "--json").json

    assert (matched["found"], matched["purged"] + matched["cancelled"]) == (400, 400)
    assert rest["gone"] == 0
    assert queue.counts().alive == 0


def test_what_is_published_meanwhile_does_not_keep_a_purge_from_its_end(queue, url, fill):
    fill("ready", 600)
    more = iter(range(8))

    def publish(_looked, _sum):
        if next(more, None) is not None:
            queue.publish_many([{}] * 250)

    done = Admin(url).purge("q", "ready", on_step=publish)

    assert 600 <= done.purged <= 849


def test_a_held_message_is_not_torn_from_its_worker(command, queue):
    queue.publish({"n": 1}, id="m")
    with queue.receive() as [job]:
        ran = command("purge", "q", "--state", "unack", "--yes")
        assert job.id == "m"

    assert ran.out == "0 deleted, 1 is running: it is not retried\n"
    assert queue.counts().totals["acked"] == 1


def test_dead_letters_are_purged_by_their_filters(command, queue, die):
    die("a", headers={"tenant": "acme"})
    die("b")

    assert (
        command("purge", "q", "--state", "dead", "--header", "tenant=acme", "--dry-run").out == "1 would be deleted\n"
    )
    assert command("purge", "q", "--state", "dead", "--header", "tenant=acme", "--yes").out == "1 deleted\n"
    assert [letter.id for letter in queue.letters()] == ["b"]


def test_nothing_is_deleted_when_nobody_can_agree(command, queue):
    queue.publish({})

    ran = command("purge", "q", "--state", "ready")

    assert (ran.code, queue.counts().ready) == (2, 1)
    assert "say --yes" in ran.err


@pytest.mark.parametrize(("dedup", "status", "worked"), [(0, "published", [2]), (600, "duplicate", [])])
def test_a_purged_id_stays_taken_for_its_dedup(command, url, queue, dedup, status, worked):
    queue.publish({"n": 1}, id="m", dedup=dedup)
    command("purge", "q", "--state", "ready", "--yes")

    assert Queue("q", url=url).publish({"n": 2}, id="m").status == status
    assert work(queue) == worked
