"""INFO of many servers as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Fields that are added up.
_SUMS = {"connected_clients", "evicted_keys"}
#: Fields of which another value than this one is told, whichever server has it.
_BEST = {"aof_enabled": "1", "maxmemory_policy": "noeviction"}


def facts_of(servers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """
    Return the fields of INFO for all of `servers`.

    Memory is that of the fullest one, clients and evicted keys are summed up; of eviction and the append-only file the
    worst is told.
    """
    fullest: Mapping[str, str] = max(servers, key=_fullness, default={})
    found = dict(fullest)
    for field in _SUMS & fullest.keys():
        found[field] = str(sum(_number(one, field) for one in servers))
    for field, best in _BEST.items():
        worse = [one[field] for one in servers if one.get(field, best) != best]
        found.update(zip([field], worse, strict=False))
    return found


def _fullness(facts: Mapping[str, str]) -> tuple[float, int]:
    used = _number(facts, "used_memory")
    return used / (_number(facts, "maxmemory") or _number(facts, "total_system_memory") or 1), used


def _number(facts: Mapping[str, str], field: str) -> int:
    text = facts.get(field, "")
    return int(text) if text.isdigit() else 0
