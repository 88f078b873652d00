"""One seed makes one schedule and one workload."""

from collections import Counter

import pytest

from tests.chaos.nemesis import FAULTS
from tests.chaos.schedule import OF_PROCESSES, OF_THE_GROUND, schedule
from tests.chaos.workload import SHARES, conduct, wish


def test_the_same_seed_makes_the_same_schedule_and_another_another():
    assert schedule(7, 60) == schedule(7, 60)
    assert schedule(7, 60) != schedule(8, 60)


@pytest.mark.parametrize("ground", OF_THE_GROUND)
@pytest.mark.parametrize(("seconds", "faults"), [(60, 25), (600, 300)])
def test_a_run_has_faults_enough_of_every_kind(seconds, faults, ground):
    for seed in range(20):
        kinds = Counter(fault.kind for fault in schedule(seed, seconds, ground))
        assert kinds.total() >= faults
        assert kinds.keys() == {*OF_PROCESSES, *OF_THE_GROUND[ground]}


def test_every_kind_has_its_function():
    assert FAULTS.keys() == {*OF_PROCESSES, *(kind for kinds in OF_THE_GROUND.values() for kind in kinds)}


def test_the_same_seed_makes_the_same_workload():
    def steps(seed):
        return [wish(seed, "p0.0", number, SHARES["server"]) for number in range(100)]

    assert steps(7) == steps(7) != steps(8)
    assert conduct(7, "m", 1, put_off=False) == conduct(7, "m", 1, put_off=False)


def test_every_answer_and_every_delay_occurs():
    wishes = [wish(1, "p0.0", number, SHARES["cluster"]) for number in range(5000)]
    answers = Counter(conduct(1, one.names[0], 1, put_off=False).answer for one in wishes)

    assert {one.delay for one in wishes} == {0.0, 0.2, 1.5}
    assert answers.keys() == {"ack", "nack", "raise", "snooze", "reject"}
    assert any(one.cancels for one in wishes)
    assert any(not one.chosen for one in wishes)


def test_what_was_put_off_is_not_put_off_again():
    again = [conduct(1, f"m{number}", 1, put_off=True).answer for number in range(1000)]

    assert "snooze" not in again
