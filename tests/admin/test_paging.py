"""Pages of a state by a cursor, while the queue moves; a search with a deadline; dead letters in groups."""

import base64

import pytest
from hostile import spoil

from reliq.admin import Admin, Filter, LetterFilter, RedriveOptions, cursor, page
from reliq.errors import ConfigurationError
from reliq.transitions import CallNumber

STATES = ("pending", "ready", "unack", "retry", "garbage", "dead")


@pytest.fixture
def many(request):
    """How many messages a long queue has."""
    return 1_000_000 if request.config.getoption("--long") else 100_000


@pytest.fixture
def desk(url):
    """The operator's view of the test's Redis."""
    desk = Admin(url)
    yield desk
    desk.close()


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


def pages(desk, state, limit, between=lambda: None):
    """Read page after page; return the ids of each."""
    found, after = [], None
    while True:
        one = desk.page("q", state, after=after, limit=limit)
        found.append([entry.id for entry in one.items])
        after = one.after
        if after is None:
            return found
        between()


def claim(queue, count):
    return [one.id for one in queue.moves.claim(CallNumber("w", claim.number()), limit=count, lease_ms=60_000).claimed]


claim.number = iter(range(1, 10**6)).__next__


@pytest.mark.parametrize("state", STATES)
def test_pages_have_every_message_of_a_state_once_in_its_order(desk, fill, state):
    ids = fill(state, 20)

    found = pages(desk, state, 7)

    assert [len(one) for one in found] == [7, 7, 6]
    seen = [id for one in found for id in one]
    assert (sorted(seen) if state == "garbage" else seen) == ids


@pytest.mark.parametrize("state", STATES)
def test_a_state_without_messages_has_one_empty_page(desk, queue, state):
    queue.publish({}, id="gone", delay=60)
    queue.cancel("gone")

    one = desk.page("q", state)

    assert (list(one.items), one.after) == ([], None)


def test_a_list_that_is_claimed_and_grows_shows_each_message_that_waits_once(desk, queue, fill):
    ids = fill("ready", 30)

    def work():
        claim(queue, 3)
        queue.publish({}, id=f"new{claim.number()}")

    found = [id for one in pages(desk, "ready", 5, work) for id in one]

    assert [id for id in found if id in ids] == ids
    assert len(set(found)) == len(found)


def test_a_place_whose_message_left_the_list_unclaimed_passes_over_nothing(desk, queue, client, fill):
    ids = fill("ready", 40)
    first = desk.page("q", "ready", limit=20)
    client.lrem(queue.keys.ready, 1, ids[19])
    claim(queue, 3)

    second = desk.page("q", "ready", after=first.after, limit=40)

    assert [entry.id for entry in second.items][-20:] == ids[20:]


@pytest.mark.parametrize("far", [200_000, 0])
def test_a_place_far_from_where_it_was_is_found_or_begun_before(desk, queue, fill, monkeypatch, far):
    monkeypatch.setattr(cursor, "NEAR", 2)
    monkeypatch.setattr(cursor, "FAR", far or 1)
    ids = fill("ready", 40)
    first = desk.page("q", "ready", limit=20)
    claim(queue, 12)

    second = desk.page("q", "ready", after=first.after, limit=2)

    assert [entry.id for entry in second.items] == ids[20:22]


def test_a_page_whose_last_message_was_claimed_is_followed_by_all_that_wait(desk, queue, fill):
    ids = fill("ready", 30)
    first = desk.page("q", "ready", limit=5)
    claim(queue, 8)

    assert [entry.id for entry in desk.page("q", "ready", after=first.after).items] == ids[8:]


@pytest.mark.parametrize("gone", [[6], [3, 4, 5, 6, 7, 8], [*range(20)]])
def test_a_place_among_messages_of_one_time_stays_when_its_message_goes(desk, queue, client, fill, gone):
    ids = fill("pending", 20)
    client.zadd(queue.keys.pending, dict.fromkeys(ids, 1_900_000_000))
    first = desk.page("q", "pending", limit=7)
    client.zrem(queue.keys.pending, *(ids[at] for at in gone))

    rest = [entry.id for entry in desk.page("q", "pending", after=first.after).items]

    assert rest == [id for at, id in enumerate(ids) if at > 6 and at not in gone]


def test_every_place_among_messages_of_one_time_is_found_when_its_message_went(desk, queue, client):
    ids = [f"m{number:02}" for number in range(30)]
    for at in range(29):
        client.zadd(queue.keys.pending, dict.fromkeys(ids, 1_900_000_000))
        first = desk.page("q", "pending", limit=at + 1)
        client.zrem(queue.keys.pending, ids[at])

        assert desk.page("q", "pending", after=first.after, limit=1).items[0].id == ids[at + 1]


def test_an_id_of_any_bytes_is_a_place_like_any_other(desk, queue, client):
    client.zadd(queue.keys.pending, {b"\xff a": 1, b"\xff b": 1, b"\xffc": 1})

    assert [len(one) for one in pages(desk, "pending", 1)] == [1, 1, 1]


def forged(text):
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "text",
    ["", "x", "é", "a b c d", "pending", "STATE nan 0 m", "STATE 1 x m", "OTHER 1 0 m"],
)
def test_a_place_that_is_none_is_refused(desk, queue, state, text):
    queue.publish({})
    other = "retry" if state == "ready" else "ready"
    after = forged(text.replace("STATE", state).replace("OTHER", other)) if " " in text else text

    with pytest.raises(ConfigurationError, match="after must be"):
        desk.page("q", state, after=after)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("text", ["STATE 1e300 0 m", "STATE inf 0 m", "STATE -5 0 m", "STATE 0 -7 m", "STATE 7 9 -"])
def test_a_forged_place_reads_messages_or_is_refused_and_breaks_nothing(desk, queue, state, text):
    queue.publish({})
    try:
        desk.page("q", state, after=forged(text.replace("STATE", state)))
    except ConfigurationError as error:
        assert "after must be" in str(error)


def test_a_page_reads_the_starts_of_bodies_and_whole_headers(desk, queue, client):
    headers = {f"name-{number}": "x" * 100 for number in range(60)}
    for number in range(10):
        queue.publish({"text": "y" * 200_000}, id=f"m{number}", headers=headers if number == 3 else {})
    client.config_resetstat()

    items = {entry.id: entry for entry in desk.page("q", "ready").items}

    assert client.info("stats")["total_net_output_bytes"] < 100_000
    assert {len(entry.body) for entry in items.values()} <= {*range(900, page.BODY_BYTES + 1)}
    assert all(entry.size == len('{"text":""}') + 200_000 for entry in items.values())
    assert (items["m3"].headers, items["m4"].headers) == (headers, {})


def test_a_page_of_large_letters_ends_after_some_bytes_and_goes_on(desk, queue, fill, monkeypatch):
    monkeypatch.setattr(page, "LETTERS_BYTES", 30)

    found = pages(desk, "dead", 50) if fill("dead", 9) else []

    assert [id for one in found for id in one] == [f"m{number:03}" for number in range(8, -1, -1)]
    assert len(found) == 3


@pytest.mark.parametrize("state", ["ready", "pending"])
def test_a_page_amid_very_many_messages_costs_few_commands_and_bytes(desk, queue, client, state, many):
    queue.publish({})
    key, middle = getattr(queue.keys, state), cursor.Cursor(state, 1_900_000_000, 0, f"m{many // 2:07}x")
    for start in range(0, many, 10_000):
        ids = [f"m{number:07}" for number in range(start, start + 10_000)]
        client.rpush(key, *ids) if state == "ready" else client.zadd(key, dict.fromkeys(ids, 1_900_000_000))
    if state == "ready":
        middle = cursor.Cursor(state, many // 2, 0, "gone")
    client.config_resetstat()

    one = desk.page("q", state, after=str(middle))

    assert len(one.items) == 50
    ran = client.info("commandstats")
    assert sum(row["calls"] for name, row in ran.items() if name.startswith(("cmdstat_z", "cmdstat_l"))) < 40
    assert client.info("stats")["total_net_output_bytes"] < 150_000


def test_a_search_finds_by_header_and_text_and_says_how_many_it_looked_at(desk, queue):
    for number in range(100):
        queue.publish({"n": number}, id=f"m{number:03}", headers={"odd": str(number % 2)})

    found = desk.search("q", "ready", Filter(headers={"odd": "1"}, match='"n":7'))

    assert [entry.id for entry in found.items] == ["m007", *(f"m{n:03}" for n in range(71, 80, 2))]
    assert (found.looked, found.of, found.after) == (100, 100, None)


@pytest.mark.parametrize("state", STATES)
def test_a_search_whose_time_is_over_says_where_to_go_on_and_finds_each_message_once(desk, fill, state):
    ids = fill(state, 40)
    found, looked, after = [], [], None
    while not looked or after is not None:
        result = desk.search("q", state, Filter(match="5"), after=after, for_seconds=0)
        found += [entry.id for entry in result.items]
        looked.append(result.looked)
        after = result.after

    assert sorted(found) == ["m005", "m015", "m025", "m035"]
    assert (sum(looked), len(looked) > 5, result.of) == (len(ids), True, len(ids))


def test_a_search_ends_when_it_has_found_enough_and_goes_on_behind_it(desk, fill):
    fill("ready", 40)

    first = desk.search("q", "ready", Filter(), limit=15)
    second = desk.search("q", "ready", Filter(), after=first.after, limit=200)

    assert (len(first.items), first.looked, second.items[0].id, len(second.items)) == (15, 15, "m015", 25)


def test_a_search_of_messages_that_live_takes_no_filter_of_letters(desk, queue):
    queue.publish({})

    with pytest.raises(ConfigurationError, match="of the state dead"):
        desk.search("q", "ready", LetterFilter(raised="KeyError at x.py:1"))


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


def test_dead_letters_are_grouped_by_reason_and_place_without_their_text(desk, fail, die):
    fail("a", "b", "c", error=KeyError("canary"))
    fail("d", error=ValueError("canary"))
    die("e", "f")

    told = desk.dead_groups("q")

    assert (told.looked, told.of) == (6, 6)
    seen = [(one.reason, one.raised.partition(":")[0], one.count, one.example) for one in told.groups]
    assert seen == [
        ("rejected", "KeyError at test_paging.py", 3, "c"),
        ("rejected", "", 2, "f"),
        ("rejected", "ValueError at test_paging.py", 1, "d"),
    ]
    assert "canary" not in repr(told)
    assert [(one.reason, one.raised, one.count) for one in desk.dead_groups("q", by=["reason"]).groups] == [
        ("rejected", None, 6)
    ]


def test_a_look_at_groups_that_has_no_time_says_how_many_letters_it_looked_at(desk, die):
    die("a", "b", "c")

    told = desk.dead_groups("q", for_seconds=0)

    assert (told.looked, told.of, told.groups[0].example) == (1, 3, "c")


def test_the_letters_of_a_group_are_found_and_redriven_by_its_reason_and_place(desk, fail, queue):
    fail("a", "b", error=KeyError("canary"))
    fail("c", error=ValueError("canary"))
    group = desk.dead_groups("q").groups[0]
    where = LetterFilter(reason=group.reason, raised=group.raised)

    assert [entry.id for entry in desk.search("q", "dead", where).items] == ["b", "a"]
    assert desk.count_letters("q", where) == 2
    assert desk.redrive("q", where, RedriveOptions()).redriven == 2
    assert [one.raised for one in desk.dead_groups("q").groups] == [
        entry.raised for entry in desk.page("q", "dead").items
    ]
    assert queue.counts().ready == 2


@pytest.mark.parametrize("by", [(), ("error",), "reason", ("reason", "id")])
def test_letters_are_grouped_by_nothing_else(desk, queue, by):
    queue.publish({})

    with pytest.raises(ConfigurationError, match="by must be some of"):
        desk.dead_groups("q", by=by)


@pytest.mark.parametrize("state", STATES)
def test_pages_and_searches_of_a_queue_that_anybody_wrote_come_to_an_end(desk, client, url, state):
    ids = spoil(client)

    met = [id for one in pages(desk, state, 50) for id in one]
    found, after, searches = 0, None, 0
    while searches == 0 or after is not None:
        result = desk.search("q", state, Filter(match="a"), after=after, limit=20)
        found, after, searches = found + len(result.items), result.after, searches + 1

    assert found <= len(met) <= len(ids) + 500
    assert searches <= len(met) + 1


def test_stories_groups_and_histories_of_a_queue_that_anybody_wrote_are_told(desk, client):
    ids = spoil(client)

    groups = desk.dead_groups("q")
    stories = [desk.story("q", id.decode("utf-8", "surrogateescape")) for id in ids[:40]]

    assert sum(group.count for group in groups.groups) == groups.looked == groups.of
    assert all(story.events for story in stories)
    assert desk.history("q") == []
