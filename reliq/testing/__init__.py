"""
The testing kit: a test has a Redis of its own, whatever its queues name, looks at what was published, and works it off.

The pytest plugin has it as the fixture `reliq`; `with isolated() as reliq` is the same without pytest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reliq.testing.drain import DrainResult
    from reliq.testing.isolation import isolated
    from reliq.testing.kit import Reliq
    from reliq.testing.published import Published, State

__all__ = ["DrainResult", "Published", "Reliq", "State", "isolated"]

#: Name -> the module that it is imported from when it is first used: pytest loads the plugin in every suite.
_HOMES = {
    "DrainResult": "reliq.testing.drain",
    "Published": "reliq.testing.published",
    "Reliq": "reliq.testing.kit",
    "State": "reliq.testing.published",
    "isolated": "reliq.testing.isolation",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'reliq.testing' has no attribute {name!r}")
    globals()[name] = getattr(import_module(_HOMES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *__all__]
