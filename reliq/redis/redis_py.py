"""redis-py, imported at its first use: its import takes longer than all of reliq."""

from typing import TYPE_CHECKING, Any

__all__ = ["redis"]

if TYPE_CHECKING:
    import redis.asyncio
else:

    class _RedisPy:
        def __getattr__(self, name: str) -> Any:
            import redis.asyncio  # noqa: PLC0415

            value = getattr(redis, name)
            setattr(self, name, value)  # later uses of this name do not call this function
            return value

    redis = _RedisPy()
