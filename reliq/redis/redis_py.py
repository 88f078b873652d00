"""redis-py, imported at the first use: it takes longer to import than all of reliq, and only connections need it."""

from typing import TYPE_CHECKING, Any

__all__ = ["redis"]

if TYPE_CHECKING:
    import redis.asyncio
else:

    class _RedisPy:
        def __getattr__(self, name: str) -> Any:
            import redis.asyncio  # noqa: PLC0415

            value = getattr(redis, name)
            setattr(self, name, value)  # later uses find it without this function
            return value

    redis = _RedisPy()
