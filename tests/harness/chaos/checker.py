"""
The counts of a run, each a pure function of its story.

A count of violations returns the messages that violate, in words. Nothing here excuses by the
schedule: what excuses a second delivery is what its first holder itself wrote down.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, permutations
from math import inf

from tests.harness.chaos.scan import balance
from tests.harness.chaos.story import MACHINE, Delivery, Message, Settling, Story

#: Redis keeps whole ms.
TICK_SECONDS = 0.001

Violations = list[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What the checker says.

    Attributes:
        violations: count -> what violates it; each must be empty.
    """

    violations: dict[str, Violations]

    @property
    def word(self) -> str:
        """`violated` or `valid`."""
        return "violated" if any(self.violations.values()) else "valid"


def check(story: Story) -> Verdict:
    """Return every count; what a run that was not drained cannot tell is not counted."""
    counts = ALWAYS | ({} if not_drained(story) else AFTER_THE_DRAIN)
    return Verdict({name: count(story) for name, count in counts.items()})


def slack(story: Story) -> float:
    """Return by how much Redis' clock and ours may have drifted apart in the run."""
    drift = max(story.clocks) - min(story.clocks) if story.clocks else 0.0
    return drift + TICK_SECONDS


# ---- at any time ----------------------------------------------------------


def unexpected(story: Story) -> Violations:
    """Started, never published, or refused for good."""
    refused = [m.name for m in story.messages.values() if m.outcome == "refused" and m.starts]
    return story.strangers + refused


def needless(story: Story) -> Violations:
    """Delivered again although nothing had kept its first holder from finishing."""
    found = []
    for message in story.messages.values():
        for one, other in pairwise(message.starts):
            if not why_again(story, message, one, other.claimed):
                found.append(f"{message.name}: {one.nonce} of {one.who}, then {other.nonce} of {other.who}")
    return found


def after_ack(story: Story) -> Violations:
    """Claimed by a call that was made after an ack was confirmed."""
    found = []
    for message in story.messages.values():
        done = min((at for one in message.deliveries for at in _confirmed(story, message, one, "acked")), default=inf)
        found += [f"{message.name}: {one.nonce} of {one.who}" for one in message.deliveries if one.asked > done]
    return found


def leased_while_held(story: Story) -> Violations:
    """Claimed while the holder's lease had not run out and the holder had not given it up."""
    spare, found = slack(story), []
    for message in story.messages.values():
        for one, other in combinations(message.deliveries, 2):
            # Redis made a claim between its asking and its answer; where these meet, either may have been first.
            orders = [pair for pair in ((one, other), (other, one)) if pair[0].asked <= pair[1].claimed]
            if all(_still_held(story, message, *pair, spare) for pair in orders):
                found.append(f"{message.name}: {one.nonce} of {one.who} and {other.nonce} of {other.who}")
    return found


def _still_held(story: Story, message: Message, one: Delivery, other: Delivery, spare: float) -> bool:
    """Say whether `one` surely held the message when `other` was claimed, if `one` was claimed first."""
    granted = [at for at, told in one.grants if at < other.claimed and not story.may_be_undone(message, at, told)]
    return bool(granted) and other.claimed < max(granted) + one.lease - spare and not one.let_go_before(other.claimed)


def overlapping(story: Story) -> Violations:
    """Two handlers at once, although nothing had kept the first holder from renewing."""
    found = []
    for message in story.messages.values():
        for one, other in pairwise(message.starts):
            begun = max(one.started or 0.0, other.started or 0.0)
            over = min(end for run in (one, other) for end in (run.ended or inf, story.deaths.get(run.who, inf)))
            if begun < over and not why_again(story, message, one, other.claimed):
                found.append(f"{message.name}: {one.nonce} of {one.who} and {other.nonce} of {other.who}")
    return found


def after_cancel(story: Story) -> Violations:
    """Started after a cancel had answered `cancelled`."""
    called_off = ((m, m.cancelled) for m in story.messages.values() if m.cancelled is not None)
    surely = [(m, told) for m, (asked, told) in called_off if not story.may_be_undone(m, asked, told)]
    return [m.name for m, told in surely if any((one.started or 0.0) > told for one in m.starts)]


def early(story: Story) -> Violations:
    """Started before it was due."""
    ahead = [(message.name, message.asked + message.delay - message.started) for message in story.messages.values()]
    spare = slack(story)
    return [f"{name}: {seconds:.3f} s too early" for name, seconds in ahead if seconds > spare]


def stale_accepted(story: Story) -> Violations:
    """A receipt was accepted a second time, or although a later claim of the message had been answered before."""
    found = []
    for message in story.messages.values():
        undone = {one.nonce for one in message.deliveries if _may_be_undone(story, message, one)}
        kept = [one for one in message.deliveries if one.nonce not in undone]
        twice = [(one, s) for one in kept for s in one.settlings if s.late and s.result == "ok"]
        found += [f"{message.name}: {s.verb} with {one.nonce} once more" for one, s in twice]
        for one, other in permutations(message.deliveries, 2):
            if other.asked > one.claimed and other in kept:
                used = [s for s in one.settlings if s.result == "ok" and s.asked > other.claimed]
                found += [f"{message.name}: {s.verb} with {one.nonce} after {other.nonce}" for s in used]
    return found


def too_many_attempts(story: Story) -> Violations:
    """More deliveries than 1 + retries + those given back unspent."""
    found = []
    for message in story.messages.values():
        unspent = sum(
            any(s.verb in ("release", "snooze") and s.may_have_run for s in one.settlings) for one in message.deliveries
        )
        pairs = pairwise(message.deliveries)
        forgotten = sum(story.may_be_undone(message, one.asked, other.claimed) for one, other in pairs)
        most = 1 + story.retries[message.queue] + unspent + forgotten
        if len(message.deliveries) > most:
            found.append(f"{message.name}: {len(message.deliveries)} deliveries, {most} allowed")
    return found


def broken_invariants(story: Story) -> Violations:
    """What a look at Redis found in a place where it cannot be."""
    return [f"{look.facts['queue']}: {one}" for look in story.looks for one in look.facts["broken"]]


def over_the_limit(story: Story) -> Violations:
    """More messages of a key surely held at once than may be."""
    spare, by_key = slack(story), defaultdict(list)
    for message in story.messages.values():
        if message.key and message.queue in story.per_key:
            for one in message.deliveries:
                until = min([_lease_end(one) - spare, *(s.asked for s in one.settlings if _lets_go(s))])
                by_key[message.queue, message.key] += [(one.claimed, 1), (until, -1)] if until > one.claimed else []
    found = []
    for (queue, key), changes in by_key.items():
        most = max(accumulate(step for _, step in sorted(changes)), default=0)
        if most > story.per_key[queue]:
            found.append(f"{queue}: {most} of {key} at once")
    return found


def out_of_order(story: Story) -> Violations:
    """Claimed before an earlier message of its key had its last delivery; what was snoozed or cancelled has no order."""
    by_key = defaultdict(list)
    for message in story.messages.values():
        verbs = {s.verb for one in message.deliveries for s in one.settlings if s.may_have_run}
        is_plain = message.deliveries and not message.delay and not message.called_off and "snooze" not in verbs
        if is_plain and message.told is not None and story.per_key.get(message.queue) == 1:
            by_key[message.queue, message.key].append(message)
    found = []
    for some in by_key.values():
        told, last, earlier = sorted(some, key=lambda one: one.told or 0.0), 0.0, 0
        for message in sorted(some, key=lambda one: one.asked):
            while (told[earlier].told or inf) < message.asked:
                last, earlier = max(last, told[earlier].deliveries[-1].asked), earlier + 1
            if message.deliveries[0].claimed < last:
                found.append(f"{message.name} of {message.key}")
    return found


def not_drained(story: Story) -> Violations:
    """Not everything was worked off in time: what stands still is as bad as what is lost."""
    if story.drained is None:
        return ["something was still alive at the end"]
    return [] if story.places and story.finals.keys() == set(story.places) else ["the last look is missing"]


# ---- after the drain ------------------------------------------------------


def lost(story: Story) -> Violations:
    """
    Publish confirmed, and neither done nor cancelled nor dead nor alive at the end.

    What a primary confirmed alone may be forgotten when its replica takes its place; what a replica confirmed may not.
    """
    dead = {id for final in story.finals.values() for id in final.facts["dead"]}
    alive = {id for final in story.finals.values() for id in final.facts["alive"]}
    confirmed = [m for m in story.messages.values() if m.outcome == "ok" and not is_forgotten(story, m)]
    return [m.name for m in confirmed if not (is_done(m) or m.called_off or m.id in dead or m.id in alive)]


def leaks(story: Story) -> Violations:
    """What is left in Redis although nothing is alive."""
    left = [(queue, final.facts["left"]) for queue, final in story.finals.items()]
    return [f"{queue}: {size} in {place}" for queue, sizes in left for place, size in sizes.items()]


def conservation(story: Story) -> Violations:
    """Redis' account of each queue against itself, and against what the processes wrote down."""
    found = []
    for queue in story.retries:
        finals = [final.facts for place, final in story.finals.items() if place.partition("#")[0] == queue]
        totals = Counter[str]()
        for final in finals:
            totals.update(final["totals"])
        mine = [m for m in story.messages.values() if m.queue == queue]
        dead = sum(len(final["dead"]) for final in finals)
        if missing := balance(totals, sum(len(final["alive"]) for final in finals)):
            found.append(f"{queue}: {missing} more came than ended or are alive")
        if dead != totals["dead"]:
            found.append(f"{queue}: {dead} letters, {totals['dead']} counted")
        for kind, least, most in _bounds(story, mine):
            if not least <= totals[kind] <= most:
                found.append(f"{queue}: {totals[kind]} {kind}, between {least} and {most} written down")
    return found


def _bounds(story: Story, messages: list[Message]) -> Iterator[tuple[str, int, int]]:
    """Yield how often each kind can have happened: surely, and at most."""
    known = [m for m in messages if m.outcome == "ok"]
    published = sum(not story.may_be_undone(m, m.asked, m.told) for m in known)
    yield "published", published, len(known) + sum(m.outcome == "unknown" for m in messages)
    acked = sum(any(True for one in m.deliveries for _ in _confirmed(story, m, one, "acked")) for m in messages)
    yield "acked", acked, sum(is_done(m) for m in messages)
    cancelled = sum(m.cancelled is not None and not story.may_be_undone(m, *m.cancelled) for m in messages)
    yield "cancelled", cancelled, sum(m.called_off for m in messages)


ALWAYS: dict[str, Callable[[Story], Violations]] = {
    "unexpected": unexpected,
    "duplicated without a reason": needless,
    "after ack": after_ack,
    "leased while held": leased_while_held,
    "overlapping without a reason": overlapping,
    "after cancel": after_cancel,
    "early": early,
    "stale accepted": stale_accepted,
    "attempts": too_many_attempts,
    "invariants": broken_invariants,
    "over the limit": over_the_limit,
    "out of order": out_of_order,
    "not drained": not_drained,
}
AFTER_THE_DRAIN: dict[str, Callable[[Story], Violations]] = {
    "lost": lost,
    "leaks": leaks,
    "conservation": conservation,
}

# ---- what they share ------------------------------------------------------


def why_again(story: Story, message: Message, one: Delivery, until: float) -> str:
    """Return why a message may be claimed again by `until` after delivery `one`, empty when there is no reason."""
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


def is_done(message: Message) -> bool:
    """Say whether the message was acked, or may have been: the answer to an ack never came."""
    return any(s.verb == "acked" and s.may_have_run for one in message.deliveries for s in one.settlings)


def is_forgotten(story: Story, message: Message) -> bool:
    """Say whether its primary may have forgotten a message that no replica had confirmed."""
    return message.durable is not True and story.may_be_undone(message, message.asked, message.told)


def _lease_end(one: Delivery) -> float:
    """Return until when a delivery is surely held, unless it is settled before."""
    return max(asked for asked, _ in one.grants) + one.lease


def _lets_go(settling: Settling) -> bool:
    return settling.verb != "extend" and settling.may_have_run


def _may_be_undone(story: Story, message: Message, one: Delivery) -> bool:
    """Say whether Redis may have forgotten the claim, or how it was settled."""
    calls = [(one.asked, one.claimed), *((s.asked, s.ended) for s in one.settlings if not s.late)]
    return any(story.may_be_undone(message, *call) for call in calls)


def _confirmed(story: Story, message: Message, one: Delivery, verb: str) -> list[float]:
    """Return when a settling was answered that nothing undid."""
    known = [(s.asked, s.ended) for s in one.settlings if s.verb == verb and s.result == "ok" and s.ended is not None]
    return [told for asked, told in known if not story.may_be_undone(message, asked, told)]
