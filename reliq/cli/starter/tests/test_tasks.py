"""Tests of the tasks; each test gets an empty Redis. Run them with `python -m pytest`."""

import pytest
from reliq import Reject
from reliq.testing import Reliq

from app.tasks import app, greet


def test_greeting_is_published_and_handled(reliq: Reliq, capsys: pytest.CaptureFixture[str]) -> None:
    greet.options(id="ada").publish("Ada")

    assert reliq.drain(app).acked == ["ada"]
    assert capsys.readouterr().out == "Hello, Ada!\n"


def test_greeting_without_a_name_is_rejected(reliq: Reliq) -> None:
    with pytest.raises(Reject, match="the name is empty"):
        reliq.perform(app, greet, "")
