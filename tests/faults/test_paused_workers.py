"""A machine that was paused: its worker goes on where it stood, when others have long taken over."""

import pytest
from waiting import eventually

#: A lease and a half.
PAUSE_SECONDS = 3.0


@pytest.mark.timeout(120)
def test_a_worker_that_was_paused_for_longer_than_a_lease_starts_nothing_that_it_held(worker, faulty, admin, hold):
    faulty.COUNTED.publish_many(range(600))
    process = worker("--queue", "counted", "--processes", "2", "--concurrency", "1")
    eventually(lambda: faulty.COUNTED.counts().totals.get("acked", 0) > 50, "both work")

    hold(PAUSE_SECONDS, process.children()[0].pid)

    eventually(lambda: faulty.COUNTED.counts().alive == 0, "everything is worked")
    counts = faulty.COUNTED.counts()
    assert (counts.missing, counts.dead, counts.totals["acked"]) == (0, 0, 600)
    times = [int(count) for count in admin.hvals("note:done")]
    assert len(times) == 600
    assert sum(times) <= 601  # what ran in its only slot when it was paused may have run twice
