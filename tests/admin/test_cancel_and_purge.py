"""`reliq cancel` and `reliq purge`: by id, by header and by text, in every state; the account balances."""

import pytest
from handling import handle_all
from transition import run_transition

STATES = ("pending", "ready", "retry", "unack", "garbage")


@pytest.fixture(autouse=True)
def the_account_balances(queue):
    yield
    assert queue.counts().missing == 0


@pytest.fixture
def fill(queue, claim):
    """Put messages into a state; messages with even numbers have the header of tenant acme."""

    def make(state, number=6):
        tenants = ["acme" if at % 2 == 0 else "bits" for at in range(number)]
        for at, tenant in enumerate(tenants):
            delay = 600 + at if state == "pending" else 0
            queue.publish({"n": at}, id=f"m{at}", delay=delay, headers={"tenant": tenant})
        if state in ("pending", "ready"):
            return
        claimed = claim(queue, number)
        if state == "garbage":
            start = 'RELIQ/1 {"d":1,"r":1,"h":{"tenant":"%s"}}\n{"n":%d}'
            values = [(start % (tenant, at)).encode() for at, tenant in enumerate(tenants)]
            run_transition(
                queue, "nack", [(one, 0, "rejected 1 x", value) for one, value in zip(claimed, values, strict=True)]
            )
            return
        run_transition(queue, "nack", [(one, 60_000 if state == "unack" else 0, "failed 1 x", b"") for one in claimed])
        while state == "retry" and queue.counts().retry < number:
            run_transition(queue, "reclaim")

    return make


def left(queue, command, state):
    """Return the ids in a state that a worker can still claim."""
    found = command("list", queue.name, "--state", state, "--limit", 1000, "--json").json
    return sorted(one["id"] for one in found if one["mark"] != "cancelled")


def work(queue):
    return [body["n"] for body in handle_all(queue)]


def test_cancel_by_id_reports_unknown_and_running_ids(command, queue, claim):
    queue.publish({"n": 1}, id="runs")
    claim(queue)
    queue.publish({"n": 2}, id="waits")
    queue.publish({"n": 3}, id="stays")

    ran = command("cancel", "q", "waits", "runs", "nobody")

    assert ran.code == 2
    assert ran.out.splitlines() == ["cancelled waits", "running runs", "not_found nobody"]
    assert work(queue) == [3]
    again = command("cancel", "q", "runs", "--json")
    assert (again.code, again.json) == (0, {"runs": "running"})


@pytest.mark.parametrize("state", ["pending", "ready", "retry", "unack"])
def test_cancel_of_a_state_obeys_its_filter(state, fill, command, queue):
    fill(state)
    match = ("--state", state, "--header", "tenant=acme")

    assert command("cancel", "q", *match, "--dry-run")[:2] == (0, "3 would be cancelled\n")
    assert command("cancel", "q", *match, "--yes")[:2] == (0, "3 cancelled\n")

    assert left(queue, command, state) == ["m1", "m3", "m5"]
    work(queue)
    assert queue.counts().totals["cancelled"] == 3


@pytest.mark.parametrize("state", STATES)
def test_purge_of_a_state_obeys_its_filter_or_deletes_all(state, fill, command, queue):
    fill(state)
    for match, meant in ((("--match", '"n":3'), "m3"), (("--header", "tenant=acme", "--match", '"n":4'), "m4")):
        ran = command("purge", "q", "--state", state, *match, "--yes", "--json")
        assert (ran.json["found"], ran.json["done"]) == (1, 1)
        assert meant not in left(queue, command, state)
    rest = left(queue, command, state)
    alive = queue.counts().alive

    dry = command("purge", "q", "--state", state, "--dry-run")
    assert (rest, dry.out, queue.counts().alive) == (["m0", "m1", "m2", "m5"], f"{alive} would be deleted\n", alive)
    assert command("purge", "q", "--state", state, "--yes").code == 0
    assert (queue.counts().alive, work(queue)) == (0, [])
    totals = queue.counts().totals
    assert (totals["purged"], totals.get("cancelled", 0)) == (6, 0)
    assert queue.publish({}, id="m0").status == ("published" if state == "unack" else "duplicate")


def test_purge_in_the_middle_of_a_list_frees_the_body_and_counts_once(fill, command, queue, client):
    fill("ready")

    command("purge", "q", "--state", "ready", "--match", '"n":3', "--yes")

    assert (client.exists(queue.keys.msg("m3")), queue.counts().ready) == (0, 6)
    assert sorted(work(queue)) == [0, 1, 2, 4, 5]
    counts = queue.counts()
    assert (counts.alive, counts.totals["purged"], counts.totals.get("cancelled", 0), counts.missing) == (0, 1, 0, 0)


def test_message_purged_in_the_middle_of_a_list_can_be_published_again_and_counts_as_purged(fill, command, queue):
    fill("ready")
    command("purge", "q", "--state", "ready", "--match", '"n":3', "--yes")

    assert queue.publish({"n": 7}, id="m3").status == "published"

    assert sorted(work(queue)) == [0, 1, 2, 4, 5, 7]
    counts = queue.counts()
    assert (counts.totals["purged"], counts.totals.get("cancelled", 0), counts.missing) == (1, 0, 0)


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_many_messages_are_purged_in_many_steps(state, command, queue, fill):
    fill(state, 800)

    matched = command("purge", "q", "--state", state, "--header", "tenant=bits", "--yes", "--json").json
    rest = command("purge", "q", "--state", state, "--yes", "--json").json

    assert (matched["found"], matched["done"]) == (400, 400)
    assert rest["gone"] == 0
    assert queue.counts().alive == 0


def test_purge_ends_although_messages_are_published_meanwhile(queue, admin, fill):
    fill("ready", 600)
    more = iter(range(8))

    def publish(_looked, _sum):
        if next(more, None) is not None:
            queue.publish_many([{}] * 250)

    done = admin.purge("q", "ready", on_step=publish)

    assert 600 <= done.done <= 849


def test_purge_lets_a_running_message_finish(command, queue):
    queue.publish({"n": 1}, id="m")
    with queue.receive() as [job]:
        ran = command("purge", "q", "--state", "unack", "--yes")
        assert job.id == "m"

    assert ran.out == "0 deleted, 1 is running: it is not retried\n"
    assert queue.counts().totals["acked"] == 1


def test_purge_of_dead_letters_obeys_its_filter(command, queue, die):
    die("a", headers={"tenant": "acme"})
    die("b")

    assert command("purge", "q", "--state", "dead", "--header", "tenant=acme", "--yes").out == "1 deleted\n"
    assert [letter.id for letter in queue.dead_letters()] == ["b"]
