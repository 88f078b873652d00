"""Pages of a state by a cursor, while the queue moves; a search with a deadline; dead letters in groups."""

import base64

import pytest
from hostile import spoil

from reliq.admin import Filter, LetterFilter, RedriveOptions, cursor, page
from reliq.errors import ConfigurationError
from reliq.transitions import CallNumber

STATES = ("pending", "ready", "unack", "retry", "garbage", "dead")


@pytest.fixture
def fill(queue, client, die):
    """Put messages into a state; return their ids in the order in which they come first."""

    def make(state, count):
        ids = [f"m{number:03}" for number in range(count)]
        if state == "dead":
            die(*ids)
            return ids[::-1]
        for id in ids:
            queue.publish({"id": id}, id=id)
        if state == "ready":
            return ids
        client.delete(queue.keys.ready)
        if state == "garbage":
            client.sadd(queue.keys.garbage, *ids)
        elif state == "retry":
            client.lpush(queue.keys.retry, *ids)
        else:
            client.zadd(getattr(queue.keys, state), {id: 1_900_000_000 + at // 4 for at, id in enumerate(ids)})
        return ids

    return make


def pages(admin, state, limit, between=lambda: None):
    """Read page after page; return the ids of each."""
    found, after = [], None
    while True:
        one = admin.page("q", state, after=after, limit=limit)
        found.append([entry.id for entry in one.items])
        after = one.after
        if after is None:
            return found
        between()


def claim(queue, count):
    return [one.id for one in queue.moves.claim(CallNumber("w", claim.number()), limit=count, lease_ms=60_000).claimed]


claim.number = iter(range(1, 10**6)).__next__


@pytest.mark.parametrize("state", STATES)
def test_pages_have_every_message_of_a_state_once_in_its_order(admin, fill, queue, state):
    queue.publish({}, id="gone", delay=60)
    queue.cancel("gone")
    empty = admin.page("q", state)
    assert (list(empty.items), empty.after) == ([], None)
    ids = fill(state, 20)

    found = pages(admin, state, 7)

    assert [len(one) for one in found] == [7, 7, 6]
    seen = [id for one in found for id in one]
    assert (sorted(seen) if state == "garbage" else seen) == ids


def test_pages_of_a_moving_list_show_each_waiting_message_once(admin, queue, fill):
    ids = fill("ready", 30)

    def work():
        claim(queue, 3)
        queue.publish({}, id=f"new{claim.number()}")

    found = [id for one in pages(admin, "ready", 5, work) for id in one]

    assert [id for id in found if id in ids] == ids
    assert len(set(found)) == len(found)


def test_cursor_whose_message_was_removed_or_claimed_skips_nothing(admin, queue, client, fill):
    ids = fill("ready", 40)
    first = admin.page("q", "ready", limit=20)
    client.lrem(queue.keys.ready, 1, ids[19])
    claim(queue, 3)
    second = admin.page("q", "ready", after=first.after, limit=40)
    assert [entry.id for entry in second.items][-20:] == ids[20:]

    claim(queue, 22)  # with the last message of the first page
    assert [entry.id for entry in admin.page("q", "ready", after=first.after).items] == ids[26:]


@pytest.mark.parametrize("far", [200_000, 1], ids=["within reach", "out of reach"])
def test_cursor_is_found_far_from_its_old_place(admin, queue, fill, monkeypatch, far):
    monkeypatch.setattr(cursor, "NEAR", 2)
    monkeypatch.setattr(cursor, "FAR", far)
    ids = fill("ready", 40)
    first = admin.page("q", "ready", limit=20)
    claim(queue, 12)

    second = admin.page("q", "ready", after=first.after, limit=2)

    assert [entry.id for entry in second.items] == ids[20:22]


def test_every_cursor_among_messages_of_one_due_time_is_found(admin, queue, client):
    ids = [f"m{number:02}" for number in range(30)]
    for at in range(29):
        client.zadd(queue.keys.pending, dict.fromkeys(ids, 1_900_000_000))
        first = admin.page("q", "pending", limit=at + 1)
        client.zrem(queue.keys.pending, *ids[max(0, at - 3) : at + 1])

        assert admin.page("q", "pending", after=first.after, limit=1).items[0].id == ids[at + 1]


def test_cursor_may_be_an_id_of_any_bytes(admin, queue, client):
    client.zadd(queue.keys.pending, {b"\xff a": 1, b"\xff b": 1, b"\xffc": 1})

    assert [len(one) for one in pages(admin, "pending", 1)] == [1, 1, 1]


def test_bad_cursor_is_refused_and_a_forged_cursor_breaks_nothing(admin, queue):
    queue.publish({})
    for state in STATES:
        other = "retry" if state == "ready" else "ready"
        forged = ("a b c d", f"{state} nan 0 m", f"{state} 1 x m", f"{other} 1 0 m")
        for after in ("", "x", "é", "pending", *map(encoded, forged)):
            with pytest.raises(ConfigurationError, match="after must be"):
                admin.page("q", state, after=after)
        for place in ("1e300 0 m", "inf 0 m", "-5 0 m", "0 -7 m", "7 9 -"):
            try:
                admin.page("q", state, after=encoded(f"{state} {place}"))
            except ConfigurationError as error:
                assert "after must be" in str(error)


def encoded(text):
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def test_page_reads_the_start_of_bodies_and_whole_headers(admin, queue, client):
    headers = {f"name-{number}": "x" * 100 for number in range(60)}
    for number in range(10):
        queue.publish({"text": "y" * 200_000}, id=f"m{number}", headers=headers if number == 3 else {})
    client.config_resetstat()

    items = {entry.id: entry for entry in admin.page("q", "ready").items}

    assert client.info("stats")["total_net_output_bytes"] < 100_000
    assert {len(entry.body) for entry in items.values()} <= {*range(900, page.BODY_BYTES + 1)}
    assert all(entry.size == len('{"text":""}') + 200_000 for entry in items.values())
    assert (items["m3"].headers, items["m4"].headers) == (headers, {})


def test_page_of_large_dead_letters_is_limited_in_bytes(admin, queue, fill, monkeypatch):
    monkeypatch.setattr(page, "LETTERS_BYTES", 30)

    found = pages(admin, "dead", 50) if fill("dead", 9) else []

    assert [id for one in found for id in one] == [f"m{number:03}" for number in range(8, -1, -1)]
    assert len(found) == 3


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_page_of_a_long_queue_costs_few_commands_and_bytes(admin, queue, client, state, request):
    many = 1_000_000 if request.config.getoption("--long") else 100_000
    queue.publish({})
    key, middle = getattr(queue.keys, state), cursor.Cursor(state, 1_900_000_000, 0, f"m{many // 2:07}x")
    for start in range(0, many, 10_000):
        ids = [f"m{number:07}" for number in range(start, start + 10_000)]
        client.rpush(key, *ids) if state == "ready" else client.zadd(key, dict.fromkeys(ids, 1_900_000_000))
    if state == "ready":
        middle = cursor.Cursor(state, many // 2, 0, "gone")
    client.config_resetstat()

    one = admin.page("q", state, after=str(middle))

    assert len(one.items) == 50
    ran = client.info("commandstats")
    assert sum(row["calls"] for name, row in ran.items() if name.startswith(("cmdstat_z", "cmdstat_l"))) < 40
    assert client.info("stats")["total_net_output_bytes"] < 150_000


def test_search_finds_by_header_and_text_up_to_a_limit(admin, queue):
    for number in range(100):
        queue.publish({"n": number}, id=f"m{number:03}", headers={"odd": str(number % 2)})

    found = admin.search("q", "ready", Filter(headers={"odd": "1"}, match='"n":7'))
    assert [entry.id for entry in found.items] == ["m007", *(f"m{n:03}" for n in range(71, 80, 2))]
    assert (found.looked, found.of, found.after) == (100, 100, None)

    first = admin.search("q", "ready", Filter(), limit=15)
    second = admin.search("q", "ready", Filter(), after=first.after, limit=200)
    assert (len(first.items), first.looked, second.items[0].id, len(second.items)) == (15, 15, "m015", 85)

    with pytest.raises(ConfigurationError, match="of the state dead"):
        admin.search("q", "ready", LetterFilter(raised="KeyError at x.py:1"))


@pytest.mark.parametrize("state", STATES)
def test_search_out_of_time_continues_and_finds_each_message_once(admin, fill, state):
    ids = fill(state, 40)
    found, looked, after = [], [], None
    while not looked or after is not None:
        result = admin.search("q", state, Filter(match="5"), after=after, for_seconds=0)
        found += [entry.id for entry in result.items]
        looked.append(result.looked)
        after = result.after

    assert sorted(found) == ["m005", "m015", "m025", "m035"]
    assert (sum(looked), len(looked) > 5, result.of) == (len(ids), True, len(ids))


@pytest.fixture
def fail(queue):
    """Have messages die of an exception, each with the line that raised it."""

    def make(*ids, error):
        for id in ids:
            queue.publish({"secret": "canary"}, id=id, retries=0)
            with queue.receive() as [job]:
                try:
                    raise error
                except Exception as caught:
                    job.reject(reason=caught)
            queue.moves.collect([id], letters_max=1000, letters_ms=10**9)

    return make


def test_dead_letters_are_grouped_found_and_redriven_by_reason_and_line(admin, fail, die, queue):
    fail("a", "b", "c", error=KeyError("canary"))
    fail("d", error=ValueError("canary"))
    die("e", "f")

    told = admin.dead_groups("q")

    assert (told.looked, told.of) == (6, 6)
    seen = [(one.reason, one.raised.partition(":")[0], one.count, one.example) for one in told.groups]
    assert seen == [
        ("rejected", "KeyError at test_paging.py", 3, "c"),
        ("rejected", "", 2, "f"),
        ("rejected", "ValueError at test_paging.py", 1, "d"),
    ]
    assert "canary" not in repr(told)
    [of_reason] = admin.dead_groups("q", by=["reason"]).groups
    assert (of_reason.reason, of_reason.raised, of_reason.count) == ("rejected", None, 6)
    for by in ((), ("error",), "reason"):
        with pytest.raises(ConfigurationError, match="by must be some of"):
            admin.dead_groups("q", by=by)
    quick = admin.dead_groups("q", for_seconds=0)
    assert (quick.looked, quick.of, quick.groups[0].example) == (1, 6, "f")

    where = LetterFilter(reason=told.groups[0].reason, raised=told.groups[0].raised)
    assert [entry.id for entry in admin.search("q", "dead", where).items] == ["c", "b", "a"]
    assert admin.count_letters("q", where) == 3
    assert admin.redrive("q", where, RedriveOptions()).redriven == 3
    assert [one.example for one in admin.dead_groups("q").groups] == ["f", "d"]
    assert queue.counts().ready == 3


def test_pages_searches_and_stories_of_a_hostile_queue_end(admin, client):
    ids = spoil(client)

    for state in STATES:
        met = [id for one in pages(admin, state, 50) for id in one]
        found, after, searches = 0, None, 0
        while searches == 0 or after is not None:
            result = admin.search("q", state, Filter(match="a"), after=after, limit=20)
            found, after, searches = found + len(result.items), result.after, searches + 1

        assert found <= len(met) <= len(ids) + 500
        assert searches <= len(met) + 1
    groups = admin.dead_groups("q")
    assert sum(group.count for group in groups.groups) == groups.looked == groups.of
    assert all(admin.story("q", id.decode("utf-8", "surrogateescape")).events for id in ids[:40])
    assert admin.history("q") == []
