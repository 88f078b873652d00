"""Each plain Redis command declares its keys."""

import inspect
from itertools import product
from typing import get_args

from reliq import keys as key_names
from reliq.admin import calls
from reliq.admin.calls import PLACES, TYPES, KeyQueueState
from reliq.keys import Keys, stack_request_key, stacks_key, worker_key
from reliq.lua import script
from reliq.message import Pause
from reliq.metrics import crons
from reliq.redis import commands, shards
from reliq.redis.commands import USES, Worker
from reliq.settings import Durability
from reliq.testing import published as testing_queries

#: It repeats the calls of `fence` for several shards.
REPEATS = {shards.witnesses}
FUNCTIONS = [
    function
    for module in (calls, commands, crons, shards, testing_queries)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and function in USES and function not in REPEATS
]

KEYS = Keys("q")
#: An argument for each type of parameter, or several where a function goes several ways.
TYPICAL = {
    "Callable[[], Any]": (list,),
    "Callable[[int], Any]": (print,),
    "Durability": (Durability.replicas(1), Durability.aof()),
    "Index": get_args(calls.Index),
    "Iterable[str]": (["a"],),
    "KeySet": get_args(calls.KeySet),
    "Keys": (KEYS,),
    "List": get_args(commands.List),
    "Pause": (Pause("me", 1.0, "why"),),
    "Script": (script("ack"),),
    "Sequence[Keys]": ([KEYS],),
    "Sequence[int]": ([1],),
    "Sequence[str]": (["a"],),
    "SortedSet": get_args(commands.SortedSet),
    "StackReport": (commands.StackReport(1.0, ()),),
    "Stream": get_args(calls.Stream),
    "Totals": (commands.Totals(1, 2, 3, 4, 5, 6, 7, None),),
    "Worker": (Worker("a", "h", 1, "1", ("q",), 1, 0, 1.0, 1.0, 1.0),),
    "bool": (False, True),
    "bytes": (b"ended",),
    "float": (1.5,),
    "int": (5,),
    "int | None": (None, 5),
    "str": ("a",),
    "str | None": ("", "1-0"),
}
#: Arguments of parameters whose type does not say which texts they take.
GIVEN = {
    "key": (KEYS.lane("w.poke"),),
    "kind": ("msg", "line"),
    "line": ("tenant",),
    "name": tuple(TYPES),
    "poke": (KEYS.lane("w.poke"),),
}
#: Places of a function that takes not all of its type.
SPOTS = {name: ("ready", "retry", KeyQueueState("tenant")) for name in ("index_of", "newest_ids")}
SPOTS |= {
    "ids_at": ("pending", "ready", "unack", "retry", KeyQueueState("tenant")),
    "size": (*(place for place in PLACES if place != "waiting"), KeyQueueState("tenant")),
}


def spelled():
    """Every key that a command may name, as Redis knows it, by the name that `@runs` calls it."""
    fixed = {name: value for name, value in vars(KEYS).items() if not name.startswith("_")}
    keys = {spelled: name for name, spelled in fixed.items() if isinstance(spelled, str) and name != "name"}
    keys |= {
        KEYS.msg("a"): "msg",
        KEYS.dedup("a"): "dedup",
        KEYS.lane("w.poke"): "lane",
        KEYS.line("tenant"): "line",
        worker_key("a"): "worker_key",
    }
    keys |= {stack_request_key("a"): "stack_request_key", stacks_key("a"): "stacks_key"}
    keys |= {KEYS.aside(name, 5): "aside" for name in TYPES}
    return keys | {value: name for name, value in vars(key_names).items() if name.endswith("_KEY")}


NAMES = spelled()


def given(function, parameter):
    """Return the arguments to try."""
    if parameter.annotation == "Spot":
        return SPOTS[function.__name__]
    return GIVEN.get(parameter.name) or TYPICAL[parameter.annotation]


def made_by(function):
    """Return each command that a function makes, for every way that it may go, with the name of its key."""
    found = set()
    parameters = inspect.signature(function).parameters
    for arguments in product(*(given(function, one) for one in parameters.values())):
        made = function(**dict(zip(parameters, arguments, strict=True)))
        for one in made if isinstance(made, list) else [made]:
            command, *rest = one.command
            keys = {NAMES[part] for part in rest if part in NAMES}
            found |= {(command, key) for key in keys or {""}}
    return found


def test_functions_declare_the_commands_that_they_make_and_their_keys():
    """A role's rights are made of what a function declares."""
    made = {function.__name__: made_by(function) for function in FUNCTIONS}
    declared = {function.__name__: USES[function] for function in FUNCTIONS}

    assert len(FUNCTIONS) > 100
    assert {name: (made[name], declared[name]) for name in made if made[name] != declared[name]} == {}
