"""Tasks outside of the module `tasks`: a worker imports them when it gets the first message."""

from shop_tasks.tasks import SEEN, task


@task()
async def greet(name):
    SEEN.append(f"hello {name}")


def plain_function():
    SEEN.append("called without being a task")


class Group:
    @task
    def nested():
        SEEN.append("never")
