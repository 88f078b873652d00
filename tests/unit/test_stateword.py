"""What a state word says, as the scripts write it."""

import pytest

from reliq.stateword import deaths, is_suspect, lane, lease_ms, waits


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("", (False, False, 0, "", None)),
        ("nacked", (True, False, 0, "", None)),
        ("suspect", (True, True, 1, "", None)),
        ("suspect12", (True, True, 12, "", None)),
        ("w7.15:30000", (False, False, 0, "w7", 30000)),
        ("w7.15:30000!", (False, False, 0, "w7", 30000)),
        ("3~w7.15:30000", (False, False, 3, "w7", 30000)),
        ("3~w7.15:30000!", (False, False, 3, "w7", 30000)),
        ("@1800000000000?", (False, False, 0, "", None)),
        ("!", (False, False, 0, "", None)),
        ("suspectx", (False, False, 0, "", None)),
        ("\udcff~.:", (False, False, 0, "", None)),
    ],
)
def test_a_state_word_is_read_as_it_was_written(word, says):
    assert (waits(word), is_suspect(word), deaths(word), lane(word), lease_ms(word)) == says
