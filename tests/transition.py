"""Run a transition of a queue as a single call, which is not repeated if it fails."""

from reliq.lua import transitions


def run_transition(queue, name, *args, **options):
    """Run the transition of this name on the keys of a queue; return its result."""
    return queue._clients.blocking().run(getattr(transitions, name)(queue.keys, *args, **options))
