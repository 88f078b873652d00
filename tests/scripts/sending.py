"""Send a call as reliq does: by its digest, and with the full script if Redis has not loaded it."""

from redis.exceptions import NoScriptError


def send(client, call):
    """Send a call; return Redis' raw reply."""
    try:
        return client.execute_command(*_encoded(call.command))
    except NoScriptError:
        return client.execute_command(*_encoded(call.command_in_full))


def _encoded(command):
    return [arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg for arg in command]
