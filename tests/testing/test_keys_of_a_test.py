"""Keys and priorities in the testing kit."""

import pytest

from reliq import Queue


def test_what_was_published_tells_its_key_and_its_priority(reliq):
    mail = Queue("mail")
    first = mail.publish({"n": 1}, key="a")
    mail.publish({"n": 2}, key="b", delay=60)
    mail.publish({"n": 3}, priority="high")
    mail.publish({"n": 4})

    found = {(one.body["n"], one.key, one.priority, one.state) for one in reliq.published(mail)}

    assert found == {
        (1, "a", "normal", "waiting"),
        (2, "b", "normal", "pending"),
        (3, None, "high", "waiting"),
        (4, None, "normal", "ready"),
    }
    assert reliq.assert_published(mail, key="a").id == first.id
    assert [one.body["n"] for one in reliq.published(mail, priority="high")] == [3]
    reliq.refute_published(mail, key="c")
    with pytest.raises(AssertionError, match="no message in 'mail' with key='c'"):
        reliq.assert_published(mail, key="c")
