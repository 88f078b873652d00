"""A process that a supervisor watches: its log, its figures, its pulse and its board, beside the consumer that works."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

from reliq.consumer.board import Board
from reliq.health import Pulse, Sampler
from reliq.logs.observer import LogObserver
from reliq.metrics.process import ProcessMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reliq.consumer.consumer import Consumer

#: The collector looks at the young objects when there are 10,000 more of them; Python's own threshold is 700.
COLLECT_AFTER = 10_000


def spare_the_collector() -> None:
    """
    Have the garbage collector look at fewer objects, and less often.

    The objects of modules stay as long as the process: a full collection, a pause for every handler, need not look
    through them. The objects of a message have no cycles and go without a collection; a handler's own cycles are
    collected a little later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def watch(
    consumer: Consumer,
    concurrency: int,
    board: Path,
    *,
    queues: Sequence[str] = (),
    pulse: Path | None = None,
    figures: Path | None = None,
    error_text: bool = False,
) -> None:
    """
    Have `consumer`, which has not started, log what happens, and write what its supervisor reads.

    Args:
        board: a file of `board_bytes(concurrency)` bytes, for what the handlers of `queues` run.
        pulse: a file for the signs that the process claims.
        figures: a file for the numbers of metrics; None: nobody asks for them.
        error_text: log the texts of exceptions, too.
    """
    handlers = consumer.chosen(queues)
    sign = Pulse(pulse)
    consumer.observers += [LogObserver(error_text=error_text), sign]
    if figures is None:
        Sampler(consumer.stats, sign.note).start()
    else:
        metrics = ProcessMetrics([handler.queue.name for handler in handlers], figures)
        consumer.observers.append(metrics)
        Sampler(consumer.stats, sign.note, metrics.sample).start()
    noted = Board(board, consumer, handlers, concurrency)
    consumer.before_call = noted.begins
    if concurrency > 1:  # else `begins` names the only coroutine
        consumer.note_step = noted.steps
    threading.Thread(target=noted.keep_up, name="reliq-board", daemon=True).start()
