"""Commands print foreign text safely: it cannot control the terminal or forge a line."""

import ast
import re
import sys
import unicodedata
from pathlib import Path

import reliq
from reliq.cli.app import Commands
from reliq.cli.output import console, print_json, print_table, say
from reliq.text import clamp_time, printable, whole_number

PACKAGE = Path(reliq.__file__).parent
#: The module that prints; commands whose --raw prints bytes; processes that print no foreign data; the starter project.
MAY_WRITE = {
    "cli/output.py",
    "cli/messages.py",
    "cli/dead.py",
    "supervisor/main.py",
    "cli/starter/app/__main__.py",
    "cli/starter/app/tasks.py",
}


def test_commands_print_only_through_the_module_that_escapes():
    ways = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in MAY_WRITE
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and re.fullmatch(r"print|typer\.s?echo|Console|sys\.std(out|err)\..*write", ast.unparse(node.func))
    }

    assert ways == set(), "use say, print_json, print_table or console of reliq.cli.output"


def test_commands_that_messages_suggest_exist():
    texts = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    suggested = {
        (str(path.relative_to(PACKAGE)), name)
        for path, text in texts.items()
        for name in re.findall(r"""shell_command\(["']([\w -]+)["']|`reliq ([a-z]+)""", text)
        for name in filter(None, name)
    }

    assert len(suggested) > 20
    assert [(file, name) for file, name in suggested if name not in Commands.places] == []


def test_printable_escapes_harmful_characters_alone():
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    harmful = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in kinds]
    shown = {one: printable(f"a{one}b") for one in harmful}
    ordinary = "Zürich 東京 \N{PARTY POPPER} user:id:7 [b]"

    assert printable(ordinary) == ordinary
    assert [one for one, text in shown.items() if not (text.isascii() and text.isprintable() and len(text) > 2)] == []


def test_text_that_names_a_command_quotes_the_names_in_it():
    """In a text such as `reliq COMMAND {name}`, the code must quote the name for the user's shell."""
    nodes = (one for path in PACKAGE.rglob("*.py") for one in ast.walk(ast.parse(path.read_text("utf-8"))))
    texts = [ast.unparse(one) for one in nodes if isinstance(one, ast.JoinedStr)]

    assert [text for text in texts if re.search(r"reliq (dead |cron )?[a-z]+ \{", text)] == [], (
        "use reliq.text.shell_command"
    )


def test_tables_print_emoji_names_and_markup_as_text(capsys):
    print_table([":id:"], [["user:id:7 [b]x[/b] [fe80::1]"]], title=":id: [/b]")
    console().print(":id: [/b] [fe80::1]")

    lines = capsys.readouterr().out.splitlines()
    assert lines == [":id: [/b]", ":id:", "user:id:7 [b]x[/b] [fe80::1]", ":id: [/b] [fe80::1]"]


def test_say_and_json_output_are_one_line_of_harmless_characters(capsys):
    say("a\nreliq: all is well\r\x1b[2J\u2028")
    assert capsys.readouterr().out == "a\\nreliq: all is well\\r\\x1b[2J\\u2028\n"

    print_json({"id": "é\x7f\x9b\u202e\u2028\N{PARTY POPPER}", "n": float("inf")})
    out = capsys.readouterr().out
    assert out == '{"id":"\\u00e9\\u007f\\u009b\\u202e\\u2028\\ud83c\\udf89","n":null}\n'


def test_numbers_and_times_of_foreign_writers_stay_within_bounds():
    read = {"7": 7, "-1": -1, "9" * 19: 10**19 - 1, "9" * 20: None, "²": None, "٣": None, "": None, "1 ": None}

    assert {text: whole_number(text) for text in read} == read
    assert {text: whole_number(text.encode()) for text in read} == read
    assert [clamp_time(float(score)) for score in ("inf", "-inf", "1e300")] == [253_402_300_799, 0, 253_402_300_799]
