"""How commands read and say durations, and print what a foreign client wrote."""

import json

import pytest

from reliq.admin.filters import duration
from reliq.cli.output import print_json
from reliq.cli.tables import print_table
from reliq.errors import ConfigurationError
from reliq.readable import DEEPEST, as_value, spoken


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86_400),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("7", 7),
    ],
)
def test_a_duration_is_read_as_a_person_writes_it(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", "5 s", "10min", "1h30", "s", "1e3s", "\u0663s"])
def test_what_is_no_duration_is_refused_with_what_is(text):
    with pytest.raises(ConfigurationError, match="30s, 10m, 2h, 1d"):
        duration(text)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0s"),
        (0.44, "440ms"),
        (1.46, "1.5s"),
        (9.96, "10s"),
        (12.4, "12s"),
        (200, "3m20s"),
        (3600, "1h"),
        (187_200, "2d4h"),
    ],
)
def test_a_duration_is_said_in_at_most_two_units(seconds, said):
    assert spoken(seconds) == said


def test_what_a_terminal_would_obey_is_escaped(capsys):
    print_table(["id"], [["\x1b[2Jgone\udcff"]])

    assert capsys.readouterr().out.split() == ["id", r"\x1b[2Jgone\udcff"]


def test_json_holds_any_id(capsys):
    print_json(["a\udcff"])

    assert json.loads(capsys.readouterr().out) == ["a\udcff"]


def test_json_that_is_nested_deeper_than_others_may_read_is_told_as_text():
    flat, deep = (b"[" * levels + b"]" * levels for levels in (DEEPEST, DEEPEST + 1))

    assert (type(as_value(flat)), as_value(deep)) == (list, deep.decode())
