"""A few seconds of chaos, as a smoke test of the harness; `.ci/do chaos` runs it for minutes."""

from collections import Counter

import pytest

from tests.harness.chaos import history
from tests.harness.chaos.checker import check
from tests.harness.chaos.report import report
from tests.harness.chaos.run import Plan, run
from tests.harness.chaos.teller import tell

pytestmark = pytest.mark.slow
SEED, SECONDS, RATE = 20261121, 8.0, 100.0


@pytest.mark.timeout(600)
def test_chaos_of_a_few_seconds_violates_nothing(tmp_path, server_path):
    run(Plan(SEED, SECONDS, RATE, drain_seconds=180, server=server_path), tmp_path)
    events = history.read(tmp_path)
    story = tell(events)
    verdict = check(story)
    page = report(story, verdict, seed=SEED, events=len(events))

    assert verdict.word == "valid", page
    assert Counter(fault.kind for fault in story.faults).total() >= 2, page
    assert any(message.starts for message in story.messages.values()), page
