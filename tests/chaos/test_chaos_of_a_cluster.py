"""A few outages of a Cluster: what a replica confirmed is not lost, nothing runs twice without a reason."""

from collections import Counter

import pytest

from tests.chaos import history
from tests.chaos.checker import check
from tests.chaos.report import report
from tests.chaos.run import Plan, run
from tests.chaos.teller import tell
from tests.chaos.timing import measure

#: Its faults: a queue gets a second shard, a slot is moved by hand, a primary is killed ahead of its replica.
SEED = 4956
SECONDS, RATE = 14.0, 120.0
LEAST_MESSAGES = 300


@pytest.mark.timeout(600)
def test_outages_of_a_cluster_violate_nothing(tmp_path, server_path):
    run(Plan(SEED, SECONDS, RATE, drain_seconds=180, server=server_path, kind="cluster", shards=4), tmp_path)
    events = history.read(tmp_path)
    story = tell(events)
    verdict = check(story)
    page = report(story, verdict, measure(story), seed=SEED, events=len(events))
    print(page)

    assert verdict.word == "valid", page
    kinds = Counter(fault.kind for fault in story.faults)
    assert kinds.keys() >= {"shards_added", "slot_moved_by_hand", "primary_killed_ahead"}
    assert sum(bool(message.starts) for message in story.messages.values()) >= LEAST_MESSAGES
