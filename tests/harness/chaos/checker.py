"""
The checks of a run, each a pure function of its story.

A check yields a text for each message that violates it. The schedule of faults excuses nothing: a second delivery is allowed
only if the process with the first delivery recorded a reason itself.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, permutations
from math import inf

from tests.harness.chaos.scan import balance
from tests.harness.chaos.story import MACHINE, Delivery, Message, Story
from tests.harness.chaos.workload import KEEP_SECONDS

#: Redis keeps whole ms.
TICK_SECONDS = 0.001


def check(story: Story) -> dict[str, list[str]]:
    """Return the violations of each check. If the run did not process all messages, skip the checks that need this."""
    counts = ALWAYS if any(not_drained(story)) else ALWAYS + AFTER_THE_DRAIN
    return {name(count): list(count(story)) for count in counts}


def name(count) -> str:
    """Return the name of a check in the report."""
    return count.__name__.replace("_", " ")


def slack(story: Story) -> float:
    """Return the possible drift between Redis' clock and the local clock during the run."""
    ahead = [clock["ahead"] for clock in story.facts("clock")] or [0.0]
    return max(ahead) - min(ahead) + TICK_SECONDS


# ---- during the run -------------------------------------------------------


def unexpected(story: Story) -> Iterator[str]:
    """Messages that started although they were never published, or were refused for good."""
    yield from story.strangers
    yield from (m.name for m in story.messages.values() if m.outcome == "refused" and m.starts)


def duplicated(story: Story) -> Iterator[str]:
    """Messages that were delivered again although nothing had kept the first holder from finishing."""
    for message, one, other in _without_reason(story):
        yield f"{message.name}: {one}, then {other}"


def after_ack(story: Story) -> Iterator[str]:
    """Claims by a call that was made after an ack was confirmed."""
    for message in story.messages.values():
        done = min(_acks(story, message), default=inf)
        yield from (f"{message.name}: {one}" for one in message.deliveries if one.asked > done)


def leased_while_held(story: Story) -> Iterator[str]:
    """Claims before the holder's lease had expired or the holder had released the message."""
    spare = slack(story)
    for message in story.messages.values():
        for one, other in combinations(message.deliveries, 2):
            # A claim takes effect between its request and its reply; if two such spans overlap, the order is open.
            orders = [pair for pair in ((one, other), (other, one)) if pair[0].asked <= pair[1].claimed]
            if all(_still_held(story, message, *pair, spare) for pair in orders):
                yield f"{message.name}: {one} and {other}"


def _still_held(story: Story, message: Message, one: Delivery, other: Delivery, spare: float) -> bool:
    """Return whether delivery `one` still owned the message when `other` was claimed."""
    granted = [at for at, told in one.grants if at < other.claimed and not story.may_be_undone(message, at, told)]
    if not granted or other.claimed >= max(granted) + one.lease - spare:
        return False
    return not any(settling.may_let_go and settling.asked < other.claimed for settling in one.settlings)


def overlapping(story: Story) -> Iterator[str]:
    """Two concurrent handlers of a message, although nothing had kept the first holder from renewing its lease."""
    for message, one, other in _without_reason(story):
        over = min(end for run in (one, other) for end in (run.ended or inf, story.deaths.get(run.who, inf)))
        if max(one.started, other.started) < over:
            yield f"{message.name}: {one} and {other}"


def after_cancel(story: Story) -> Iterator[str]:
    """Starts after a cancel returned `cancelled`."""
    for message in story.messages.values():
        asked, told = message.cancelled or (inf, inf)
        if any(one.started > told for one in message.starts) and not story.may_be_undone(message, asked, told):
            yield message.name


def early(story: Story) -> Iterator[str]:
    """Starts before the due time."""
    spare = slack(story)
    for message in story.messages.values():
        ahead = message.asked + message.delay - min((one.started for one in message.starts), default=inf)
        if ahead > spare:
            yield f"{message.name}: {ahead:.3f} s too early"


def stale_accepted(story: Story) -> Iterator[str]:
    """Receipts that were accepted a second time, or after the reply to a later claim of the message."""
    for message in story.messages.values():
        kept = {one.nonce for one in message.deliveries if not _may_be_undone(story, message, one)}
        for one in message.deliveries:
            late = [s for s in one.settlings if s.late and s.result == "ok" and one.nonce in kept]
            yield from (f"{message.name}: {s.verb} with {one.nonce} once more" for s in late)
        for one, other in permutations(message.deliveries, 2):
            if other.asked > one.claimed and other.nonce in kept:
                used = [s for s in one.settlings if s.result == "ok" and s.asked > other.claimed]
                yield from (f"{message.name}: {s.verb} with {one.nonce} after {other.nonce}" for s in used)


def attempts(story: Story) -> Iterator[str]:
    """Messages with more deliveries than 1 + retries, not counting deliveries that spent no retry."""
    (begun,) = story.facts("begun")
    for message in story.messages.values():
        most = 1 + begun["retries"][message.queue]
        for one in message.deliveries:
            most += any(s.verb in ("release", "snooze") and s.may_have_run for s in one.settlings)
        for one, other in pairwise(message.deliveries):
            most += story.may_be_undone(message, one.asked, other.claimed)
        if len(message.deliveries) > most:
            yield f"{message.name}: {len(message.deliveries)} deliveries, {most} allowed"


def invariants(story: Story) -> Iterator[str]:
    """Invalid states that the arena found in Redis during the run."""
    for look in story.facts("look"):
        yield from (f"{look['queue']}: {one}" for one in look["broken"])


def over_the_limit(story: Story) -> Iterator[str]:
    """Keys with more concurrent messages than their limit; leases that may have ended do not count."""
    (begun,) = story.facts("begun")
    spare = slack(story)
    by_key = defaultdict(list)
    for message in story.messages.values():
        if message.key and message.queue in begun["per_key"]:
            for one in message.deliveries:
                lease_end = max(asked for asked, _ in one.grants) + one.lease - spare
                until = min([lease_end, *(s.asked for s in one.settlings if s.may_let_go)])
                if until > one.claimed:
                    by_key[message.queue, message.key] += [(one.claimed, 1), (until, -1)]
    for (queue, key), changes in by_key.items():
        most = max(accumulate(step for _, step in sorted(changes)))
        if most > begun["per_key"][queue]:
            yield f"{queue}: {most} of {key} at once"


def over_the_rate(story: Story) -> Iterator[str]:
    """Starts that cost more than their rate by cost allows in any window, even if the window had its longest time."""
    (begun,) = story.facts("begun")
    spare = slack(story)
    for queue, (rate, burst) in begun["costs"].items():
        messages = (m for m in story.messages.values() if m.queue == queue)
        starts = sorted((one.since, one.claimed, m.cost, m.name) for m in messages for one in m.starts)
        paid, end, least = 0, 0.0, inf
        for since, claimed, cost, name_ in starts:
            least = min(least, paid - rate * since)
            paid, end = paid + cost, max(end, claimed)
            if (over := paid - rate * (end + spare) - least - burst) > 0:
                yield f"{queue}: {over:.0f} too much with {name_}"


def out_of_order(story: Story) -> Iterator[str]:
    """Claims before the last delivery of an earlier message of their key; snoozed or cancelled messages are skipped."""
    (begun,) = story.facts("begun")
    by_key = defaultdict(list)
    for message in story.messages.values():
        is_snoozed = any(s.verb == "snooze" and s.may_have_run for s in message.settlings)
        is_plain = message.deliveries and not message.delay and not message.called_off and not is_snoozed
        if is_plain and message.told is not None and begun["per_key"].get(message.queue) == 1:
            by_key[message.queue, message.key].append(message)
    for some in by_key.values():
        told = sorted(some, key=lambda one: one.told)
        last = 0.0
        for message in sorted(some, key=lambda one: one.asked):
            while told[0].told < message.asked:
                last = max(last, told.pop(0).deliveries[-1].asked)
            if message.deliveries[0].claimed < last:
                yield f"{message.name} of {message.key}"


def skipped(story: Story) -> Iterator[str]:
    """Items of acked long jobs that no delivery has done: a cursor was ahead of the work."""
    for message in story.messages.values():
        if message.is_done and (missing := set(range(message.walk)).difference(message.walked)):
            yield f"{message.name}: {sorted(missing)}"


def not_drained(story: Story) -> Iterator[str]:
    """Messages that were not processed in time."""
    ended = [set(end["places"]) for end in story.facts("ended")]
    if not story.notes["drained"]:
        yield "something was still alive at the end"
    elif ended != [{final["queue"] for final in story.facts("final")}]:
        yield "the last look is missing"


# ---- after the drain ------------------------------------------------------


def lost(story: Story) -> Iterator[str]:
    """
    Confirmed publishes that are neither done, cancelled, dead nor alive at the end.

    A failover may lose a message that only the primary confirmed, but never a message that a replica confirmed.
    """
    left = story.left_at_the_end()
    for m in story.messages.values():
        if m.outcome == "ok" and not (story.is_forgotten(m) or m.is_done or m.called_off or m.id in left):
            yield m.name


def leaks(story: Story) -> Iterator[str]:
    """Redis keys that remain although no message is alive."""
    for final in story.facts("final"):
        yield from (f"{final['queue']}: {size} in {place}" for place, size in final["left"].items())


def conservation(story: Story) -> Iterator[str]:
    """Compare Redis' account of each queue with itself and with the histories of the processes."""
    for queue in story.facts("begun")[0]["retries"]:
        finals = [final for final in story.facts("final") if final["queue"].partition("#")[0] == queue]
        totals = Counter()
        for final in finals:
            totals.update(final["totals"])
        dead = sum(len(final["dead"]) for final in finals)
        if missing := balance(totals, sum(len(final["alive"]) for final in finals)):
            yield f"{queue}: {missing} more came than ended or are alive"
        if dead != totals["dead"]:
            yield f"{queue}: {dead} letters, {totals['dead']} counted"
        for kind, least, most in _bounds(story, [m for m in story.messages.values() if m.queue == queue]):
            if not least <= totals[kind] <= most:
                yield f"{queue}: {totals[kind]} {kind}, between {least} and {most} written down"


def unstored(story: Story) -> Iterator[str]:
    """
    Acked messages without a result: the script that acks a message also stores its result.

    Only late acks bring no result. They are accepted after a failover has undone the consumer's own ack.
    """
    for final in story.facts("final"):
        acked = final["totals"].get("acked", 0) if final["queue"] in KEEP_SECONDS else 0
        settlings = (s for m in story.messages.values() if m.queue == final["queue"] for s in m.settlings)
        late = sum(s.late and s.verb == "acked" and s.result == "ok" for s in settlings)
        if not acked - late <= final["results"] + final["totals"].get("results_dropped", 0) <= acked:
            yield f"{final['queue']}: {final['results']} results, {acked} acked"


def _bounds(story: Story, messages: list[Message]) -> Iterator[tuple[str, int, int]]:
    """Yield the minimum and maximum number of events of each kind that the histories allow."""
    known = [m for m in messages if m.outcome == "ok"]
    published = sum(not story.may_be_undone(m, m.asked, m.told) for m in known)
    yield "published", published, len(known) + sum(m.outcome == "unknown" for m in messages)
    yield "acked", sum(any(_acks(story, m)) for m in messages), sum(m.is_done for m in messages)
    cancelled = sum(m.cancelled is not None and not story.may_be_undone(m, *m.cancelled) for m in messages)
    yield "cancelled", cancelled, sum(m.called_off for m in messages)


ALWAYS = (
    *(unexpected, duplicated, after_ack, leased_while_held, overlapping, after_cancel, early, stale_accepted),
    *(attempts, invariants, over_the_limit, over_the_rate, out_of_order, skipped, not_drained),
)
AFTER_THE_DRAIN = (lost, leaks, conservation, unstored)

# ---- helpers ---------------------------------------------------------------


def why_again(story: Story, message: Message, one: Delivery, until: float) -> str:
    """Return why a message may be claimed again by `until` after delivery `one`; empty without a reason."""
    for settling in one.settlings:
        if settling.verb == "acked" and settling.result == "unknown" and settling.asked < until:
            return "unknown ack"
        if settling.verb in ("nack", "release", "snooze") and settling.may_have_run and settling.asked < until:
            return settling.verb
    if one.asked < story.deaths.get(one.who, inf) < until:
        return "killed or stopped"
    for trouble in (*story.troubles[one.who], *story.troubles[MACHINE], *story.rewinds[message.queue]):
        if trouble.meets(one.asked, until):
            return trouble.kind
    return ""


def _without_reason(story: Story) -> Iterator[tuple[Message, Delivery, Delivery]]:
    """Yield each second start of a message for which the histories contain no reason."""
    for message in story.messages.values():
        for one, other in pairwise(message.starts):
            if not why_again(story, message, one, other.claimed):
                yield message, one, other


def _may_be_undone(story: Story, message: Message, one: Delivery) -> bool:
    """Return whether a failover may have lost the claim or its settlement."""
    calls = [(one.asked, one.claimed), *((s.asked, s.ended) for s in one.settlings if not s.late)]
    return any(story.may_be_undone(message, *call) for call in calls)


def _acks(story: Story, message: Message) -> Iterator[float]:
    """Yield the reply time of each ack, without acks that a failover may have undone."""
    for one in message.settlings:
        if one.verb == "acked" and one.result == "ok" and not story.may_be_undone(message, one.asked, one.ended):
            yield one.ended
