"""
The testing kit: a test has a Redis of its own, whatever its queues name, looks at what was published, and works it off.

The pytest plugin has it as the fixture `reliq`; `with isolated() as reliq` is the same without pytest.
"""

from reliq.testing.drain import DrainResult
from reliq.testing.kit import Reliq, isolated
from reliq.testing.published import Published, State

__all__ = ["DrainResult", "Published", "Reliq", "State", "isolated"]
