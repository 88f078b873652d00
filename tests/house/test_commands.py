"""Every plain Redis command has a name, in one of few modules, and says which keys it is run on."""

import ast
import inspect
from itertools import product
from pathlib import Path

import pytest

from reliq import commands, crons, keys as key_names, minutes, shardmap, stacks
from reliq.admin import key_queries, queries, queue_queries, server
from reliq.admin.places import PLACES, TYPES, LinePlace
from reliq.keys import Keys, stack_request_key, stacks_key, worker_key
from reliq.lua import script
from reliq.message import Pause
from reliq.relay import lanes
from reliq.rights import USES
from reliq.roster import Worker
from reliq.settings import Durability
from reliq.testing import queries as testing_queries

PACKAGE = Path(commands.__file__).parent
MODULES = (
    commands,
    crons,
    minutes,
    shardmap,
    stacks,
    queries,
    queue_queries,
    key_queries,
    server,
    testing_queries,
    lanes,
)
FUNCTIONS = [
    function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
]

KEYS = Keys("q")
#: What each parameter may be given: a value for each way that a function may go.
GIVEN = {
    "after": ("", "1-0"),
    "among": ("ring", "asleep"),
    "any_key": ("elsewhere",),
    "any_keys": (["elsewhere"],),
    "asked": (list,),
    "at": (0,),
    "before": ("+",),
    "count": (2,),
    "counted": (print,),
    "cursor": (0,),
    "durability": (Durability.replicas(1), Durability.aof()),
    "entries": (["q"],),
    "entry": ("daily",),
    "first": ("-",),
    "for_ms": (None, 5),
    "for_seconds": (1.0,),
    "id": ("a",),
    "group": ("read",),
    "ids": (["a"],),
    "index": ("pending", "unack", "garbage", "retries_left", "lease", "errors"),
    "kind": ("msg", "line"),
    "key": (KEYS.lane("w.poke"),),
    "keys": (KEYS,),
    "lane": ("w.poke",),
    "last": ("+",),
    "letter": ("1-0",),
    "line": ("tenant",),
    "letters": (["1-0"],),
    "lasts_ms": (5,),
    "length": (5,),
    "minutes": ([1],),
    "most": (5,),
    "name": tuple(TYPES),
    "newest": (False, True),
    "newest_first": (False, True),
    "now_ms": (1,),
    "now_seconds": (1,),
    "only_first": (False, True),
    "pattern": ("*:ready",),
    "pause": (Pause("me", 1.0, "why"),),
    "poke": (KEYS.lane("w.poke"),),
    "queues": ([KEYS],),
    "report": (stacks.StackReport(1.0, ()),),
    "score": (1.5,),
    "script": (script("ack"),),
    "section": ("server",),
    "stamp": (1,),
    "stream": ("ends", "history", "dead"),
    "to": ("other",),
    "totals": (minutes.Totals(1, 2, 3, 4, 5, 6, 7, None),),
    "why": (b"ended",),
    "without": (False, True),
    "worker": (Worker("a", "h", 1, "1", ("q",), 1, 0, 1.0, 1.0, 1.0),),
}
#: What a parameter may be given that means something else in other functions.
PLACES = {
    "scores": ("pending", "unack"),
    "first_score": ("pending", "unack"),
    "end_of": ("ready", "retry"),
    "due_between": ("pending", "unack"),
    "ids_at": ("pending", "ready", "unack", "retry", LinePlace("tenant")),
    "index_of": ("ready", "retry", LinePlace("tenant")),
    "newest_ids": ("ready", "retry", LinePlace("tenant")),
    "scored_at": ("pending", "unack"),
    "rank": ("pending", "unack"),
    "score": ("pending", "unack"),
    "count_to": ("pending", "unack"),
    "size": (*(place for place in PLACES if place != "waiting"), LinePlace("tenant")),
}


def spelled():
    """Every key that a command may name, as Redis knows it, by the name that `@runs` calls it."""
    fixed = {name: getattr(KEYS, name) for name in Keys.__slots__ if not name.startswith("_")}
    keys = {spelled: name for name, spelled in fixed.items() if isinstance(spelled, str) and name != "name"}
    keys |= {
        KEYS.msg("a"): "msg",
        KEYS.dedup("a"): "dedup",
        KEYS.lane("w.poke"): "lane",
        KEYS.line("tenant"): "line",
        worker_key("a"): "worker_key",
    }
    keys |= {stack_request_key("a"): "stack_request_key", stacks_key("a"): "stacks_key"}
    keys |= {KEYS.aside(name, 1): "aside" for name in TYPES}
    return keys | {value: name for name, value in vars(key_names).items() if name.endswith("_KEY")}


def made_by(function):
    """Return the command and key names of all that a function makes, for every way that it may go."""
    found = set()
    names = inspect.signature(function).parameters
    for given in product(*(PLACES[function.__name__] if name in ("place", "spot") else GIVEN[name] for name in names)):
        made = function(**dict(zip(names, given, strict=True)))
        for one in made if isinstance(made, list) else [made]:
            command, *rest = one.command
            keys = {spelled()[part] for part in rest if part in spelled()}
            found |= {(command, key) for key in keys or {""}}
    return found


def test_no_other_module_spells_a_command():
    homes = {Path(module.__file__) for module in MODULES} | {PACKAGE / "call.py"}
    others = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in homes]

    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in others
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Command"
    ]

    assert found == []


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_runs_what_it_says_on_the_keys_it_says(function):
    assert made_by(function) == USES[function]
