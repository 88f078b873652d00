"""No function and no file is longer than one can hold in mind."""

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "reliq"
FUNCTION_LINES, FILE_LINES = 30, 300
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text, tree):
    """The numbers of the lines that hold code: no docstrings, comments or blank lines."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def sizes():
    """Name of each file or function -> its lines; the signature of a command, which is its options, is left out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text("utf-8"), str(path.relative_to(PACKAGE))
        tree = ast.parse(text)
        lines = code_lines(text, tree)
        yield name, len(text.splitlines()), FILE_LINES
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0].lineno if name.startswith("cli/") else node.lineno
                yield f"{name}: {node.name}", len(lines & {*range(first, node.end_lineno + 1)}), FUNCTION_LINES


def test_no_function_has_more_than_thirty_lines_of_code_and_no_file_more_than_three_hundred():
    long = {name: size for name, size, limit in sizes() if size > limit}

    assert long == {}
