"""Rule 3 at full size: two hundred thousand messages due in the same second."""

import pytest
from held_clock import micros

from reliq import transitions as t

MANY = 200_000


@pytest.mark.foreign_hands
def test_a_flood_that_is_due_at_once_is_promoted_in_bounded_calls(run, client, keys):
    ids = [f"m{number:06}" for number in range(MANY)]
    for start in range(0, MANY, 20_000):
        client.zadd(keys.pending, dict.fromkeys(ids[start : start + 20_000], micros() / 1e6))

    moved = []
    while not moved or moved[-1]:
        count, _ = run(t.promote(keys, limit=500, clock=micros(1000)))
        moved.append(count)

    assert moved == [500] * (MANY // 500) + [0]
    assert client.zcard(keys.pending) == 0
    assert [id.decode() for id in client.lrange(keys.ready, 0, -1)[::-1]] == ids
