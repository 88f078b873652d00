"""How a message tells to install what comes with an extra; no other module says where reliq itself comes from."""


def missing(who: str, what: str, extra: str) -> str:
    """Return that `who` needs `what`, and that it comes with the extra of reliq of that name."""
    return f"{who} needs {what}: install it, or reliq with its extra {extra!r} from where you have reliq"
