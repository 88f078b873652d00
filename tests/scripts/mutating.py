"""Run a random model with a mutant of a script in place of the script."""

from dataclasses import replace
from hashlib import sha1

from reliq.lua import script, transitions


def is_caught(monkeypatch, verb, old, new, play, seeds=240):
    """Return whether `play`, called with one seed after another, fails with `new` in the script `verb` in place of `old`."""
    original = script(verb)
    assert old in original.text
    text = original.text.replace(old, new)
    mutant = replace(original, text=text, sha=sha1(text.encode()).hexdigest())
    monkeypatch.setattr(transitions, "script", lambda name: mutant if name == verb else script(name))
    for seed in range(seeds):
        try:
            play(seed)
        except Exception:  # an error of the script is a failure too
            return True
    return False
