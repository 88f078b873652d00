"""What is printed goes one way: what a foreign client wrote obeys no terminal, and forges no line."""

import ast
import re
import sys
import unicodedata

import pytest
from test_layers import PACKAGE, modules

from reliq.cli.output import console, print_json, say
from reliq.cli.tables import print_table
from reliq.foreign import moment, printable, whole_number

#: Where the one way is.
THE_WAY = {"cli/output.py"}
#: What a user asks for with --raw is its bytes; processes of the benchmark talk to each other, of its own queue.
BYTES = {"cli/show.py", "cli/dead.py"}
OF_ITS_OWN = {"bench/child.py", "bench/removal.py", "process/main.py"}

#: What a terminal obeys, and what turns a line round or hides in it.
HARMFUL = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x200B, 0x2010), *range(0x2028, 0x202F))]
HARMFUL += [chr(code) for code in (0xAD, 0x61C, *range(0x2060, 0x2070), 0xFEFF, 0xDC80, 0xDCFF, 0xD800, 0xE0001)]


def calls(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_module_prints(path):
    name = str(path.relative_to(PACKAGE))
    ways = {one for one in calls(path) if re.fullmatch(r"print|typer\.s?echo|Console|sys\.std(out|err)\..*write", one)}

    if name in BYTES:
        ways -= {"sys.stdout.buffer.write"}
    if name in OF_ITS_OWN:
        ways -= {"sys.stdout.write", "sys.stderr.write"}
    assert name in THE_WAY or ways == set(), "say it with reliq.cli.output.say, print_json, print_table or console()"


@pytest.mark.parametrize("one", HARMFUL, ids=lambda one: f"{ord(one):04X}")
def test_what_a_terminal_obeys_hides_or_turns_round_is_escaped(one):
    shown = printable(f"a{one}b")

    assert shown.isprintable()
    assert shown.isascii()
    assert shown != "ab"


def test_every_control_and_every_separator_of_lines_is_escaped():
    escaped = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs")]

    assert [code for code in escaped if printable(chr(code)) == chr(code)] == []


def test_what_people_write_stays_as_it_is():
    assert printable("Zürich 東京 \N{PARTY POPPER} user:id:7 [b]") == "Zürich 東京 \N{PARTY POPPER} user:id:7 [b]"


def test_names_of_emoji_and_markup_are_text(capsys):
    print_table([":id:"], [["user:id:7 [b]x[/b] [fe80::1]"]], title=":id: [/b]")
    console().print(":id: [/b] [fe80::1]")

    lines = capsys.readouterr().out.splitlines()
    assert lines == [":id: [/b]", ":id:", "user:id:7 [b]x[/b] [fe80::1]", ":id: [/b] [fe80::1]"]


def test_a_line_stays_one_line(capsys):
    say("a\nreliq: all is well\r\x1b[2J\u2028")

    assert capsys.readouterr().out == "a\\nreliq: all is well\\r\\x1b[2J\\u2028\n"


def test_json_is_ascii_and_says_the_same(capsys):
    print_json({"id": "é\x7f\x9b\u202e\u2028\N{PARTY POPPER}", "n": float("inf")})

    out = capsys.readouterr().out
    assert out == '{"id":"\\u00e9\\u007f\\u009b\\u202e\\u2028\\ud83c\\udf89","n":null}\n'


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("-1", -1),
        ("9" * 19, 10**19 - 1),
        ("9" * 20, None),
        ("²", None),
        ("٣", None),
        ("", None),
        ("1 ", None),
    ],
)
def test_a_number_is_one_within_bounds(text, number):
    assert (whole_number(text), whole_number(text.encode())) == (number, number)


@pytest.mark.parametrize(("score", "seconds"), [("inf", 253_402_300_799), ("-inf", 0), ("1e300", 253_402_300_799)])
def test_a_score_is_a_time_that_has_a_date(score, seconds):
    assert moment(float(score)) == seconds
