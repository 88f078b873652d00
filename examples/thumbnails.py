"""
Shrink pictures on every processor: work that keeps the interpreter busy, in several processes.

The same file holds the handler and starts the worker, as a supervisor would:
`reliq worker thumbnails:consumer --processes 2`.

    python examples/thumbnails.py [PICTURES]
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stage import a_redis, print_account, running

from reliq import Consumer, Outgoing, Queue

WIDTH, HEIGHT, FACTOR = 192, 144, 8


@dataclass(frozen=True)
class Picture:
    """The message: shrink this file into that one."""

    source: str
    target: str


PICTURES = Queue("pictures", Picture, retries=3)
consumer = Consumer()


@consumer.handler(PICTURES, timeout=60)
def make_thumbnail(picture: Picture) -> None:
    """
    Shrink a picture; done twice, it gives the same file.

    The lease is renewed by a thread of its own, however busy this handler keeps the interpreter. The file gets its
    name at the end, so nobody ever sees half of one.
    """
    small = shrunk(Path(picture.source).read_bytes(), FACTOR)
    unfinished = Path(f"{picture.target}.{os.getpid()}")
    unfinished.write_bytes(small)
    unfinished.replace(picture.target)
    print(f"{Path(picture.target).name} by process {os.getpid()}\n", end="", flush=True)


def shrunk(ppm: bytes, factor: int) -> bytes:
    """Return a binary PPM picture, each square of `factor` pixels made one of their mean colour."""
    _, size, _, pixels = ppm.split(b"\n", 3)
    width, height = (int(number) for number in size.split())
    small = bytearray()
    for top in range(0, height, factor):
        for left in range(0, width, factor):
            for colour in range(3):
                square = (
                    pixels[3 * (y * width + x) + colour]
                    for y in range(top, top + factor)
                    for x in range(left, left + factor)
                )
                small.append(sum(square) // factor**2)
    return b"P6\n%d %d\n255\n" % (width // factor, height // factor) + bytes(small)


def painted(number: int) -> bytes:
    """Return a picture of our own: a slope of colours, another for each number."""
    pixels = bytes(
        value for y in range(HEIGHT) for x in range(WIDTH) for value in (x % 256, y % 256, (x + y + number) % 256)
    )
    return b"P6\n%d %d\n255\n" % (WIDTH, HEIGHT) + pixels


def main(pictures: int) -> None:
    """Paint pictures, let two processes shrink them, and look at the result."""
    with a_redis(), tempfile.TemporaryDirectory() as folder:
        sources = [Path(folder, f"{number:03}.ppm") for number in range(pictures)]
        for number, source in enumerate(sources):
            source.write_bytes(painted(number))
        targets = [source.with_suffix(".small.ppm") for source in sources]
        pairs = zip(sources, targets, strict=True)
        PICTURES.publish_many(Outgoing(body=Picture(str(source), str(target))) for source, target in pairs)

        command = [sys.executable, "-m", "reliq", "worker", "thumbnails:consumer"]
        command += ["--processes", "2", "--concurrency", "2", "--burst=delayed", "--log-level", "warning"]
        with running(*command, cwd=Path(__file__).parent) as worker:
            worker.wait()

        small = f"P6\n{WIDTH // FACTOR} {HEIGHT // FACTOR}\n".encode()
        good = sum(target.read_bytes().startswith(small) for target in targets)
        print(f"{good} of {pictures} pictures are {WIDTH // FACTOR} x {HEIGHT // FACTOR} now.")
        print_account(PICTURES)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
