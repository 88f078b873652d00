"""Scripts by digest or in full, that the commands of a round trip run in their order."""

import weakref
from collections.abc import Sequence
from typing import Any

import redis

from reliq.call import Arg
from reliq.lua import text_of


def is_unknown_script(reply: Any) -> bool:
    """Say whether Redis does not know a script by its digest."""
    return isinstance(reply, redis.ResponseError) and (
        isinstance(reply, redis.exceptions.NoScriptError) or str(reply).startswith("NOSCRIPT")
    )


def is_denied_eval(reply: Any) -> bool:
    """Say whether the user may run no scripts but by their digests."""
    return isinstance(reply, redis.exceptions.NoPermissionError) and "'eval'" in str(reply)


class KnownScripts:
    """
    The scripts that a server has, as far as this process has seen.

    Redis refuses a digest that it does not know and goes on with the commands behind it. The script would then be sent in
    full and run after those. A script that the server may lack goes in full at once when something comes behind it.

    Attributes:
        sent: connection -> the digests of what was sent over it in full and is not answered yet.
    """

    def __init__(self) -> None:
        self._known: set[Arg] = set()
        self._may_eval: bool | None = None  # nobody knows yet
        #: Connection -> what it is connected by: another one means that the server may be another too.
        self._links: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.sent: dict[Any, set[Arg]] = {}

    def spelled(self, commands: Sequence[Sequence[Arg]], connection: Any, link: Any) -> Sequence[Sequence[Arg]]:
        """Return several commands as they are to be sent together over a connection."""
        if self._may_eval is False:
            return commands
        known = self._links.get(connection)
        if link is None or known is None or known() is not link:
            if link is None or known is not None:
                self.forget()
            if link is not None:  # somebody has closed the connection: it is made anew as it is used
                self._links[connection] = weakref.ref(link)
        for command in commands[:-1]:
            if command[0] == "EVALSHA" and command[1] not in self._known:
                break
        else:
            return commands
        sent = self.sent[connection] = set()
        spelled = [self._in_full(command, sent) for command in commands[:-1]]
        # While nobody knows whether the user may EVAL every script goes in full: all are refused, or none.
        return [*spelled, commands[-1] if self._may_eval else self._in_full(commands[-1], sent)]

    def answered(self, connection: Any, refusals: Sequence[Any]) -> None:
        """Learn from what was answered over a connection; `refusals` are all answers when there is one among them."""
        if (sent := self.sent.pop(connection, None)) and not refusals:
            self._known |= sent
            self._may_eval = True
        if refusals and any(map(is_denied_eval, refusals)):
            self._may_eval = False
        if refusals and any(map(is_unknown_script, refusals)):
            self.forget()

    def forget(self) -> None:
        """Note that the server may have lost its scripts, or be another one."""
        self._known = set()
        self.sent.clear()

    def _in_full(self, command: Sequence[Arg], sent: set[Arg]) -> Sequence[Arg]:
        """Return a command with the text of its script, where the server may lack that and is not `sent` it before."""
        if command[0] != "EVALSHA" or command[1] in self._known or (self._may_eval and command[1] in sent):
            return command
        text = text_of(command[1])
        if text is None:
            return command
        sent.add(command[1])
        return ("EVAL", text, *command[2:])
