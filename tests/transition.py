"""Run a transition of a queue as a single call, which is not repeated if it fails."""

from reliq.lua import transitions

#: How much longer than usual to wait for the reply: Redis may get no turn for a second on a busy machine.
PATIENT_SECONDS = 30.0


def run_transition(queue, name, *args, **options):
    """Run the transition of this name on the keys of a queue; return its result."""
    return queue._clients.blocking(PATIENT_SECONDS).run(getattr(transitions, name)(queue.keys, *args, **options))
