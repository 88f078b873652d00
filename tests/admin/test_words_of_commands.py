"""How commands read and print durations, and print text that a foreign client wrote."""

import json

import pytest

from reliq.admin.filters import duration
from reliq.cli.output import print_json, print_table
from reliq.errors import ConfigurationError
from reliq.text import format_duration


def test_duration_is_parsed():
    durations = {"30s": 30, "10m": 600, "2h": 7200, "1d": 86_400, "1h30m": 5400, "250ms": 0.25, "1.5h": 5400, "7": 7}

    assert {text: duration(text) for text in durations} == durations
    for text in ("", "soon", "-5s", "5 s", "10min", "1h30", "s", "1e3s", "\u0663s"):
        with pytest.raises(ConfigurationError, match="30s, 10m, 2h, 1d"):
            duration(text)


def test_duration_is_printed_in_at_most_two_units():
    durations = {
        0: "0s",
        0.44: "440ms",
        1.46: "1.5s",
        9.96: "10s",
        12.4: "12s",
        200: "3m20s",
        3600: "1h",
        187_200: "2d4h",
    }

    assert {seconds: format_duration(seconds) for seconds in durations} == durations


def test_output_escapes_control_characters(capsys):
    print_table(["id"], [["\x1b[2Jgone\udcff"]])
    assert capsys.readouterr().out.split() == ["id", r"\x1b[2Jgone\udcff"]

    print_json(["a\udcff"])
    assert json.loads(capsys.readouterr().out) == ["a\udcff"]


def test_narrow_terminal_gets_every_cell_whole_and_folds_the_long_ones_first(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns, ids_are_whole in ((40, True), (30, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_table(["id", "error"], [["i" * 22, "x" * 60]] * 2, ["error"])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= columns
        assert (text.count("i" * 22) == 2) == ids_are_whole
        assert (text.count("i"), text.count("x")) == (2 * 22 + 1, 2 * 60)
