"""A call is sent to Redis as reliq sends it: by its digest, and with its text where Redis does not know it."""

from redis.exceptions import NoScriptError


def send(client, call):
    """Make a call; return what Redis answers, unread."""
    try:
        return client.execute_command(*call.command)
    except NoScriptError:
        return client.execute_command(*call.command_in_full)
