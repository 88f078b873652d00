"""A move, a redrive to another queue and a bulk publish lose and double nothing, wherever the operator is killed."""

from collections import Counter
from pathlib import Path

import pytest
from killing import every_point, handle_all, move, publish_lines, redrive

from reliq import Admin, Queue

pytestmark = pytest.mark.timeout(600)

BODIES = ["a", "b", "c"]


class Account:
    """Two queues on an emptied server; whatever happens between them, each body is handled once."""

    bodies = BODIES

    def __init__(self, client, url, act, *arguments, drained):
        self.client, self.url, self.act, self.arguments, self.drained = client, url, act, arguments, drained
        self.queues = [Queue(name, str, url=url) for name in ("from", "to")]

    def clear(self):
        self.client.flushall()
        self.queues[1].publish("known", id="known")
        with self.queues[1].receive():
            pass

    def check(self, point):
        handled = Counter()
        if self.drained:
            handle_all(self.url, "from", "to", handled=handled)
        self.act(Admin(self.url), *self.arguments)
        handle_all(self.url, "from", "to", handled=handled)
        assert handled == Counter(self.bodies), f"killed at {point}"
        for queue in self.queues:
            counts = queue.counts()
            assert (counts.alive, counts.missing, counts.dead) == (0, 0, 0), f"{queue} after a kill at {point}"
        assert not self.client.exists(self.queues[0].keys.moving)


@pytest.mark.parametrize(("state", "drained"), [("ready", True), ("retry", False)])
def test_a_move_that_is_killed_anywhere_is_finished_by_making_it_again(state, drained, client, url, redis_server):
    account = Account(client, url, move, state, drained=drained)
    source = account.queues[0]

    def stage():
        account.clear()
        source.publish_many(BODIES)
        if state == "retry":
            with source.receive(limit=3) as jobs:
                for job in jobs:
                    job.nack(delay=0)
            while source.counts().retry < len(BODIES):
                source.moves.reclaim()

    points = every_point(redis_server.port, move, state, stage=stage, check=account.check)

    assert points >= 12


def test_a_move_of_delayed_ones_that_is_killed_anywhere_keeps_their_due_times(client, url, redis_server):
    source, target = Queue("from", str, url=url), Queue("to", str, url=url)
    due = {}

    def stage():
        client.flushall()
        target.publish("known", id="known")
        for body in BODIES:
            due[body] = source.publish(body, id=body, delay=600).due

    def check(point):
        move(Admin(url), "pending")
        there = {id.decode(): score for id, score in client.zrange(target.keys.pending, 0, -1, withscores=True)}
        assert there == pytest.approx(due, abs=0.0021), f"killed at {point}"
        assert (source.counts().alive, source.counts().missing, target.counts().missing) == (0, 0, 0)
        left = client.pttl(target.keys.msg("a")) / 1000
        assert 7 * 86_400 <= left <= 7 * 86_400 + 601

    assert every_point(redis_server.port, move, "pending", stage=stage, check=check) >= 12


@pytest.mark.parametrize(("to", "drained"), [("to", True), ("to", False), (None, True)])
def test_a_redrive_that_is_killed_anywhere_is_finished_by_making_it_again(to, drained, client, url, redis_server):
    account = Account(client, url, redrive, to, drained=drained)
    source = account.queues[0]

    def stage():
        account.clear()
        source.publish_many(BODIES)
        with source.receive(limit=3) as jobs:
            for job in jobs:
                job.reject(reason="bad card")
        source.moves.collect([job.id for job in jobs], letters_max=100, letters_ms=10**9)

    points = every_point(redis_server.port, redrive, to, stage=stage, check=account.check)

    assert points >= 4


def test_a_file_whose_publish_is_killed_anywhere_is_published_once(client, url, redis_server, tmp_path):
    lines = [f"line {number}" for number in range(600)]
    file = tmp_path / "lines"
    file.write_text("\n".join(lines))
    account = Account(client, url, publish_lines, file, drained=True)
    account.bodies = lines

    def stage():
        account.clear()
        for one in Path(tmp_path).glob("*.reliq-progress*"):
            one.unlink()

    points = every_point(redis_server.port, publish_lines, file, stage=stage, check=account.check)

    assert points >= 2
