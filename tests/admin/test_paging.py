"""Pages of a state by a cursor while the queue changes; searches with a deadline; dead letters in groups."""

import base64

import pytest
from handling import pages, raised, searches
from hostile import spoil

from reliq.admin import Filter, messages
from reliq.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("unhurried")

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


def ids_of(pages):
    return [entry.id for page in pages for entry in page]


@pytest.mark.parametrize("state", STATES)
def test_pages_have_every_message_of_a_state_once_in_its_order(admin, fill, queue, state):
    queue.publish({}, id="gone", delay=60)
    queue.cancel("gone")
    assert ids_of(pages(admin, state, 7)) == []
    ids = fill(state, 20)

    found = pages(admin, state, 7)

    assert [len(one) for one in found] == [7, 7, 6]
    seen = ids_of(found)
    assert (sorted(seen) if state == "garbage" else seen) == ids


def test_pages_of_a_moving_list_show_each_waiting_message_once(admin, queue, fill, claim):
    ids = fill("ready", 30)

    def work():
        claim(queue, 3)
        queue.publish({})

    found = ids_of(pages(admin, "ready", 5, work))

    assert [id for id in found if id in ids] == ids
    assert len(set(found)) == len(found)


def test_cursor_whose_message_was_removed_or_claimed_skips_nothing(admin, queue, client, fill, claim):
    ids = fill("ready", 40)
    first = admin.page("q", "ready", limit=20)
    client.lrem(queue.keys.ready, 1, ids[19])
    claim(queue, 3)
    assert ids_of([admin.page("q", "ready", after=first.after, limit=40).items])[-20:] == ids[20:]

    claim(queue, 22)  # with the last message of the first page
    assert ids_of([admin.page("q", "ready", after=first.after).items]) == ids[26:]


def test_place_is_found_far_from_where_it_was(admin, queue, fill, claim, monkeypatch):
    monkeypatch.setattr(messages, "STEP_IDS", 4)
    ids = fill("ready", 40)
    first = admin.page("q", "ready", limit=20)
    claim(queue, 12)

    assert ids_of([admin.page("q", "ready", after=first.after, limit=2).items]) == ids[20:22]


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
        forged = ("a b c d", f"{state} 0 nan m", f"{state} 0 -", f"{state} 7 1 m", f"{state} x 1 m", f"{other} 0 1 m")
        for after in ("", "x", "é", "pending", *map(encoded, forged)):
            with pytest.raises(ConfigurationError, match="after must be"):
                admin.page("q", state, after=after)
        for place in ("1e+300 m", "inf m", "-5 m", "0 -7 m", "999999999 m", "7 9", "7-9"):
            try:
                admin.page("q", state, after=encoded(f"{state} 0 {place}"))
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
    assert {len(entry.body) for entry in items.values()} <= {*range(900, messages.BODY_BYTES + 1)}
    assert all(entry.size == len('{"text":""}') + 200_000 for entry in items.values())
    assert (items["m3"].headers, items["m4"].headers) == (headers, {})


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_page_of_a_long_queue_costs_few_commands_and_bytes(admin, queue, client, state, request):
    many = 1_000_000 if request.config.getoption("--long") else 100_000
    queue.publish({})
    key, middle = getattr(queue.keys, state), f"pending 0 1900000000.0 m{many // 2:07}x"
    for start in range(0, many, 10_000):
        ids = [f"m{number:07}" for number in range(start, start + 10_000)]
        client.rpush(key, *ids) if state == "ready" else client.zadd(key, dict.fromkeys(ids, 1_900_000_000))
    if state == "ready":
        middle = f"ready 0 {many // 2} gone"
    client.config_resetstat()

    one = admin.page("q", state, after=encoded(middle))

    assert len(one.items) == 50
    ran = client.info("commandstats")
    assert sum(row["calls"] for name, row in ran.items() if name.startswith(("cmdstat_z", "cmdstat_l"))) < 40
    assert client.info("stats")["total_net_output_bytes"] < 150_000


def test_search_finds_by_header_and_text_up_to_a_limit(admin, queue):
    for number in range(100):
        queue.publish({"n": number}, id=f"m{number:03}", headers={"odd": str(number % 2)})

    found = admin.page("q", "ready", Filter(headers={"odd": "1"}, match='"n":7'))
    assert [entry.id for entry in found.items] == ["m007", *(f"m{n:03}" for n in range(71, 80, 2))]
    assert (found.looked, found.of, found.after) == (100, 100, None)

    first = admin.page("q", "ready", Filter(), limit=15)
    second = admin.page("q", "ready", Filter(), after=first.after, limit=200)
    assert (len(first.items), first.looked, second.items[0].id, len(second.items)) == (15, 15, "m015", 85)

    with pytest.raises(ConfigurationError, match="cannot have 'raised'"):
        admin.page("q", "ready", Filter(raised="KeyError at x.py:1"))


@pytest.mark.parametrize("state", STATES)
def test_search_out_of_time_continues_and_finds_each_message_once(admin, fill, state):
    ids = fill(state, 40)

    found = searches(admin, state, Filter(match="5"), for_seconds=0)

    assert sorted(ids_of(one.items for one in found)) == ["m005", "m015", "m025", "m035"]
    assert {one.of for one in found} == {sum(one.looked for one in found)} == {len(ids)}
    assert len(found) > 1


def test_dead_letters_are_grouped_found_and_redriven_by_reason_and_line(admin, die, queue):
    die("a", "b", "c", error=raised(KeyError("canary")))
    die("d", error=raised(ValueError("canary")))
    die("e", "f")

    told = admin.dead_groups("q")

    assert (told.looked, told.of) == (6, 6)
    seen = [(one.reason, one.raised.partition(":")[0], one.count, one.example) for one in told.groups]
    assert seen == [
        ("rejected", "KeyError at handling.py", 3, "c"),
        ("rejected", "", 2, "f"),
        ("rejected", "ValueError at handling.py", 1, "d"),
    ]
    assert "canary" not in repr(told)
    quick = admin.dead_groups("q", for_seconds=0)
    assert (quick.looked, quick.of, quick.groups[0].example) == (1, 6, "f")

    where = Filter(reason=told.groups[0].reason, raised=told.groups[0].raised)
    assert [entry.id for entry in admin.page("q", "dead", where).items] == ["c", "b", "a"]
    assert admin.count("q", "dead", where) == 3
    assert admin.redrive("q", where).done == 3
    assert [one.example for one in admin.dead_groups("q").groups] == ["f", "d"]
    assert queue.counts().ready == 3


def test_pages_searches_and_stories_of_a_hostile_queue_end(admin, client):
    ids = spoil(client)

    for state in STATES:
        met = ids_of(pages(admin, state, 50))
        found = searches(admin, state, Filter(match="a"), limit=20)

        assert len(ids_of(one.items for one in found)) <= len(met) <= len(ids) + 500
        assert len(found) <= len(met) + 1
    groups = admin.dead_groups("q")
    assert sum(group.count for group in groups.groups) == groups.looked == groups.of
    assert all(admin.show("q", id.decode("utf-8", "surrogateescape")).timeline for id in ids[:40])
    assert admin.history("q") == []
