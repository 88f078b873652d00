"""Many items, as many at a time as one call takes."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def chunked(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield items, at most so many at a time."""
    rest = iter(items)
    while chunk := list(islice(rest, most)):
        yield chunk


def chunked_by_size(items: Iterable[T], size: Callable[[T], int], largest: int, most: int) -> Iterator[list[T]]:
    """Yield items, at most `most` at a time, whose sizes come to `largest` at most; a larger item comes alone."""
    chunk, total = list[T](), 0
    for item in items:
        total += size(item)
        if chunk and (total > largest or len(chunk) == most):
            yield chunk
            chunk, total = [], size(item)
        chunk.append(item)
    if chunk:
        yield chunk
