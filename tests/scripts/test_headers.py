"""Rules 8 and 14: script headers declare the keys and arguments in use; loader, transitions and Redis agree."""

import inspect
import re
from itertools import chain
from types import SimpleNamespace

import pytest
from every_call import keyed_queue, stage
from every_script import KEYED, NAMES, OF_LIMITS, ONCE, SCRIPTS, source

import reliq.lua
from reliq.keys import limit_key
from reliq.lua import script, script_names, transitions as t

KEY_NAMES = set(chain.from_iterable(one.keys for one in SCRIPTS.values()))
TAIL_KEYS = {"msg": "body", "dedup": "mark"}
FAMILIES = {"lane", "line", "msg", "result"}


def code(text):
    """Return the text without comments and strings."""
    return re.sub(r"'[^']*'", "''", "\n".join(line for line in text.splitlines() if not line.strip().startswith("--")))


def spelled_of(keys, name):
    """Return a Redis key of a queue by its name; for a family of keys, the common prefix."""
    return getattr(keys, name)("") if name in FAMILIES else getattr(keys, name)


def words(text):
    return set(re.findall(r"[A-Za-z_]\w*", text))


def helpers(prelude):
    """Return the opening of a prelude, and its functions by name."""
    text = code(source(prelude))
    found = re.finditer(r"^local function (\w+)\((?:[^\n]* end|[\s\S]*?\nend)$", text, re.MULTILINE)
    return text[: text.index("local function")], {one[1]: one[0] for one in found}


OPENING, HELPERS = helpers("prelude")
KEYED_OPENING, KEYED_HELPERS = helpers("keyed/prelude")


def used_words(text):
    """Return the words of a function or a script without the names of its local variables."""
    own = re.findall(r"\blocal ([\w, ]+?) =", text)
    return words(text) - (OF_LIMITS & {word for names in own for word in names.split(", ")})


def everything_run_by(name):
    """Return the words of a script, of the preludes' openings, and of all helpers that it calls, also indirectly."""
    if name in KEYED or (branch := f"{name} (keyed)") not in KEYED:
        return words_of_branch(name, keyed=name in KEYED or OF_LIMITS & {*SCRIPTS[name].keys})
    return words_of_branch(name, keyed=False) | words_of_branch(branch, keyed=True) | {"keyed"}


def words_of_branch(name, *, keyed):
    seen = used_words(code(source(name))) | words(OPENING + KEYED_OPENING if keyed else OPENING)
    functions = HELPERS | KEYED_HELPERS if keyed else HELPERS
    while more := {word for helper in seen & functions.keys() for word in used_words(functions[helper])} - seen:
        seen |= more
    return seen


def offenders(fault_of):
    """Return the scripts that have a fault, with the fault."""
    return {name: fault for name, one in ONCE.items() if (fault := fault_of(name, one))}


def test_headers_name_the_keys_and_arguments_that_their_scripts_use():
    def unused(name, header):
        given = {*header.keys, *header.args, *(arg.upper() for arg in header.tail_args)}
        return (given | {TAIL_KEYS[key] for key in header.tail_keys}) - everything_run_by(name)

    def undeclared(name, header):
        # `held` is a key in scripts of limits, and a local variable elsewhere.
        known = KEY_NAMES if OF_LIMITS & {*header.keys} else KEY_NAMES - OF_LIMITS
        given = {*header.keys, *(TAIL_KEYS[key] for key in header.tail_keys)}
        return everything_run_by(name) & (known | {*TAIL_KEYS.values()}) - given

    assert {"arg", "body", "mark", "put", "push_token", "receipts", "forget", "recall"} <= HELPERS.keys()
    assert offenders(unused) == {}
    assert offenders(undeclared) == {}


def test_scripts_use_names_and_no_numbered_keys_or_arguments():
    assert offenders(lambda name, _: {"KEYS", "ARGV"} & words(code(source(name)))) == {}


def test_headers_describe_the_answer_and_the_answer_when_nothing_is_to_do():
    def missing(name, _):
        comment = source(name).partition("\n\n")[0]
        return [
            part for part in ("Returns  ", "Nothing to do: ") if not re.search(rf"^-- {part}\S", comment, re.MULTILINE)
        ]

    assert offenders(missing) == {}


def test_headers_name_the_commands_of_the_texts_on_their_own_keys():
    def wrong(_, header):
        run = re.findall(r"(?:redis\.p?call|\bread|\brun)\(([^,)]*)", header.text)
        tables = re.findall(r"= \{ ('[A-Z]+'(?:, '[A-Z]+')*) \}", header.text)
        text = {command for part in (*run, *tables) for command in re.findall(r"'([A-Z]+)'", part)}
        strange = {key for _, key in header.uses} - {"", *header.keys, *header.tail_keys}
        return text ^ {command for command, _ in header.uses} | strange

    assert offenders(wrong) == {}


def test_calls_pass_the_keys_and_arguments_that_headers_declare(run, client, keys):
    calls = stage(run, client, keys)

    def wrong(name, header):
        call, own = calls[name], keys.of_shard(1) if name == "leave" else keys
        own = keyed_queue(own) if "keyed" in name or name == "limit" else own
        own = SimpleNamespace(shared=limit_key("api")) if name == "book" else own
        lead, tail = call.keys[: len(header.keys)], call.keys[len(header.keys) :]
        faults = [
            key
            for key, spelled in zip(header.keys, lead, strict=True)
            if not (spelled.startswith(own.lane("")) if key == "lane" else spelled == spelled_of(own, key))
        ]
        families = header.tail_keys
        items = len(tail) // max(1, len(families))
        for at, family in enumerate(families):
            some, start = tail[at * items : (at + 1) * items], getattr(own, family)("")
            faults += [key for key in some if not key.startswith(start)]
        over = len(call.args) - len(header.args)
        if header.tail_args:
            brings_keys = "keyed" not in header.args or call.args[header.args.index("keyed")] == "1"
            items, over = divmod(over, len(header.tail_args) - (not brings_keys))
        return faults or over or len(tail) not in (0, items * len(families))

    assert {name: fault for name in NAMES if (fault := wrong(name, SCRIPTS[name]))} == {}


def test_there_is_one_transition_for_each_script():
    transitions = {
        name
        for name, function in inspect.getmembers(t, inspect.isfunction)
        if function.__module__ == t.__name__
        and not name.startswith("_")
        and str(function.__annotations__.get("return")).startswith("reliq.redis.commands.Call")
    }

    assert transitions == set(script_names())


def test_redis_knows_scripts_by_the_digests_of_their_texts(client):
    assert offenders(lambda _, header: client.script_load(header.text) != header.sha) == {}


def test_a_script_whose_header_is_not_in_the_form_is_refused(monkeypatch, tmp_path):
    (tmp_path / "broken.lua").write_text("-- broken: a -> b\n--\n-- KEYS  pending\n\nreturn 1\n")
    (tmp_path / "prelude.lua").write_text("")
    monkeypatch.setattr(reliq.lua, "files", lambda _: tmp_path)

    with pytest.raises(ValueError, match=r"broken\.lua does not begin with the header"):
        script("broken")
