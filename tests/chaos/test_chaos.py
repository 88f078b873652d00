"""A minute of faults: nothing is lost, nothing runs twice without a reason, everything is worked off."""

from collections import Counter

import pytest

from tests.chaos import history
from tests.chaos.checker import check
from tests.chaos.report import report
from tests.chaos.run import Plan, run
from tests.chaos.teller import tell
from tests.chaos.timing import measure

SEED = 20261121
SECONDS, RATE = 60.0, 240.0
#: Of so many messages (14,400 are to be published) a machine with other things to do may manage fewer.
LEAST_MESSAGES = 2500
FAULTS, KINDS = 25, 6


@pytest.mark.timeout(600)
def test_a_minute_of_faults_violates_nothing(tmp_path, server_path):
    run(Plan(SEED, SECONDS, RATE, drain_seconds=180, server=server_path), tmp_path)
    events = history.read(tmp_path)
    story = tell(events)
    verdict = check(story)
    page = report(story, verdict, measure(story), seed=SEED, events=len(events))
    print(page)

    assert verdict.word == "valid", page
    kinds = Counter(fault.kind for fault in story.faults)
    assert kinds.total() >= FAULTS
    assert len(kinds) >= KINDS
    assert sum(bool(message.starts) for message in story.messages.values()) >= LEAST_MESSAGES
