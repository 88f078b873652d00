"""Send a call as reliq does: by its digest, and with the full script if Redis has not loaded it."""

from redis.exceptions import NoScriptError


def send(client, call):
    """Send a call; return Redis' raw reply."""
    try:
        return client.execute_command(*call.command)
    except NoScriptError:
        return client.execute_command(*call.command_in_full)
