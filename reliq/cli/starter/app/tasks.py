"""The tasks, for publishers and workers; importing this module does not connect to Redis."""

from reliq import Reject, Tasks

app = Tasks("greetings", retries=5)


@app.task(timeout=60)
def greet(name: str) -> None:
    """Print a greeting. After a crash, reliq may run a task twice: the second run must do no harm."""
    if not name:
        raise Reject("the name is empty")
    print(f"Hello, {name}!", flush=True)
