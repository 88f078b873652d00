"""Import redis-py at its first use, because its import takes longer than the import of reliq itself."""

from typing import TYPE_CHECKING, Any

__all__ = ["redis"]

if TYPE_CHECKING:
    import redis.asyncio
else:

    class _RedisPy:
        def __getattr__(self, name: str) -> Any:
            import redis.asyncio  # noqa: PLC0415

            value = getattr(redis, name)
            setattr(self, name, value)  # the next use of this name does not call `__getattr__`
            return value

    redis = _RedisPy()
