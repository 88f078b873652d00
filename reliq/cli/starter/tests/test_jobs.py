"""Tests of the handlers, each with an empty Redis: `python -m pytest`."""

import pytest
from reliq import Reject
from reliq.testing import Reliq

from app.jobs import consumer
from app.queues import GREETINGS, Greeting


def test_greeting_is_published_and_handled(reliq: Reliq, capsys: pytest.CaptureFixture[str]) -> None:
    GREETINGS.publish(Greeting("Ada"), id="ada")

    assert reliq.drain(consumer).acked == ["ada"]
    assert capsys.readouterr().out == "Hello, Ada!\n"


def test_greeting_without_a_name_is_rejected(reliq: Reliq) -> None:
    with pytest.raises(Reject, match="the name is empty"):
        reliq.perform(consumer, GREETINGS, Greeting(""))
