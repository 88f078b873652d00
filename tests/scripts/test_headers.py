"""Rules 8 and 14: a header says what its script uses, and the loader, the transitions and Redis agree with it."""

import inspect
import re
from itertools import chain

import pytest
from every_call import keyed_queue, stage
from every_script import NAMES, OF_LIMITS, SCRIPTS, source

import reliq.lua
from reliq import transitions as t
from reliq.keys import Keys
from reliq.lua import script, script_names

KEY_NAMES = set(chain.from_iterable(one.keys for one in SCRIPTS.values()))
TAIL_KEYS = {"msg": "body", "dedup": "mark"}
FAMILIES = {"lane", "line", "msg"}
every_script = pytest.mark.parametrize("name", NAMES)


def code(text):
    """The text without comments and strings."""
    return re.sub(r"'[^']*'", "''", "\n".join(line for line in text.splitlines() if not line.strip().startswith("--")))


def spelled_of(keys, name):
    """A key of a queue by its name: of a family its start."""
    return getattr(keys, name)("") if name in FAMILIES else getattr(keys, name)


def words(text):
    return set(re.findall(r"[A-Za-z_]\w*", text))


def helpers(prelude):
    """The opening of a prelude, and its functions by name."""
    text = code(source(prelude))
    found = re.finditer(r"^local function (\w+)\((?:[^\n]* end|[\s\S]*?\nend)$", text, re.MULTILINE)
    return text[: text.index("local function")], {one[1]: one[0] for one in found}


PRELUDE, KEYED_PRELUDE = code(source("prelude")), code(source("keyed/prelude"))
OPENING, HELPERS = helpers("prelude")
KEYED_OPENING, KEYED_HELPERS = helpers("keyed/prelude")


def used_words(text):
    """The words of a function or a script, but for those that it gives to locals of its own."""
    own = re.findall(r"\blocal ([\w, ]+?) =", text)
    return words(text) - (OF_LIMITS & {word for names in own for word in names.split(", ")})


def everything_run_by(name):
    """The words of a script, of the preludes' openings, and of the helpers that it calls, directly or not."""
    keyed = OF_LIMITS & {*SCRIPTS[name].keys}
    seen = used_words(code(source(name))) | words(OPENING + KEYED_OPENING if keyed else OPENING)
    functions = HELPERS | KEYED_HELPERS if keyed else HELPERS
    while more := {word for helper in seen & functions.keys() for word in used_words(functions[helper])} - seen:
        seen |= more
    return seen


def test_the_prelude_has_the_helpers_that_this_test_looks_for():
    assert {"arg", "body", "mark", "put", "push_token", "receipts", "forget", "recall"} <= HELPERS.keys()


@every_script
def test_every_key_and_argument_of_a_header_is_used(name):
    header = SCRIPTS[name]
    run = everything_run_by(name)

    assert {*header.keys, *header.args} <= run
    assert {arg.upper() for arg in header.tail_args} <= run
    assert {TAIL_KEYS[key] for key in header.tail_keys} <= run


@every_script
def test_every_key_that_is_used_is_in_the_header(name):
    run = everything_run_by(name)
    # `held` is a key there, and elsewhere what a script holds.
    known = KEY_NAMES if OF_LIMITS & {*SCRIPTS[name].keys} else KEY_NAMES - OF_LIMITS

    assert run & known <= {*SCRIPTS[name].keys}
    assert run & {*TAIL_KEYS.values()} <= {TAIL_KEYS[key] for key in SCRIPTS[name].tail_keys}


@every_script
def test_a_body_uses_names_and_no_numbered_keys_or_arguments(name):
    assert {"KEYS", "ARGV"}.isdisjoint(words(code(source(name))))


@every_script
def test_a_header_says_what_returns_and_what_happens_when_there_is_nothing_to_do(name):
    comment = source(name).partition("\n\n")[0]

    assert re.search(r"^-- Returns  \S", comment, re.MULTILINE)
    assert re.search(r"^-- Nothing to do: \S", comment, re.MULTILINE)


@every_script
def test_a_header_names_the_commands_of_the_text(name):
    run = re.findall(r"(?:redis\.p?call|\bread|\brun)\(([^,)]*)", SCRIPTS[name].text)
    tables = re.findall(r"= \{ ('[A-Z]+'(?:, '[A-Z]+')*) \}", SCRIPTS[name].text)

    said = {command for part in (*run, *tables) for command in re.findall(r"'([A-Z]+)'", part)}

    assert said == {command for command, _ in SCRIPTS[name].uses}


@every_script
def test_a_header_names_no_key_but_its_own_in_what_it_runs(name):
    assert {key for _, key in SCRIPTS[name].uses} - {""} <= {*SCRIPTS[name].keys, *SCRIPTS[name].tail_keys}


@every_script
def test_a_call_passes_the_keys_that_the_header_declares(name, run, client, keys):
    call = stage(run, client, keys)[name]
    head, keys = SCRIPTS[name].keys, keys.of_shard(1) if name == "leave" else keys
    keys = keyed_queue(keys) if "keyed" in name or name == "limit" else keys

    lead, tail = call.keys[: len(head)], call.keys[len(head) :]

    for key, spelled in zip(head, lead, strict=True):
        assert spelled.startswith(keys.lane("")) if key == "lane" else spelled == spelled_of(keys, key)
    families = SCRIPTS[name].tail_keys
    items = len(tail) // max(1, len(families))
    for at, family in enumerate(families):
        assert all(key.startswith(getattr(keys, family)("")) for key in tail[at * items : (at + 1) * items])


@every_script
def test_a_call_passes_the_arguments_that_the_header_declares(name, run, client, keys):
    call = stage(run, client, keys)[name]
    head, tail = SCRIPTS[name].args, SCRIPTS[name].tail_args
    messages = len(call.keys) - len(SCRIPTS[name].keys)

    items, over = divmod(len(call.args) - len(head), len(tail)) if tail else (messages, len(call.args) - len(head))

    assert over == 0
    assert messages in (0, items * len(SCRIPTS[name].tail_keys))


def test_there_is_one_transition_for_each_script():
    transitions = {
        name
        for name, function in inspect.getmembers(t, inspect.isfunction)
        if function.__module__.startswith(f"{t.__name__}.")
        and str(function.__annotations__.get("return")).startswith("reliq.call.Call")
    }

    assert transitions == set(script_names())


@every_script
def test_redis_knows_a_script_by_the_digest_of_its_text(name, client):
    assert client.script_load(SCRIPTS[name].text) == SCRIPTS[name].sha


def test_a_script_whose_header_is_not_in_the_form_is_refused(monkeypatch, tmp_path):
    (tmp_path / "broken.lua").write_text("-- broken: a -> b\n--\n-- KEYS  pending\n\nreturn 1\n")
    (tmp_path / "prelude.lua").write_text("")
    monkeypatch.setattr(reliq.lua, "files", lambda _: tmp_path)

    with pytest.raises(ValueError, match=r"broken\.lua does not begin with the header"):
        script("broken")


def test_queues_share_no_key():
    one, other = Keys("one"), Keys("one-more")

    spelled = {value for name in KEY_NAMES for value in (spelled_of(one, name), spelled_of(other, name))}

    assert len(spelled) == 2 * len(KEY_NAMES)
