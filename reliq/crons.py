"""
The periodic entries of a queue as Redis has them: a hash with some fields for each entry, `ENTRY FIELD`.

    schedule   when it ticks, as the process that started last has it
    seen       when a process with that schedule last said that it is there, in unix seconds, to ten of them
    last       the tick up to which all is done, in unix seconds
    ticked     the last tick that was published, in unix seconds
    id         of its last message, a run that was asked for included
    missed, paused, overlap   how many ticks nobody published in time; were skipped in a pause; for a message was alive
    pause      who paused it, when and why, as a queue's pause; none when it is not paused
    asked      when somebody asked for a run at once, in unix ms, until it is published

The scripts `register` and `tick` write all of them but `pause` and `asked`.
"""

from __future__ import annotations
