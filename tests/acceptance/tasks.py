"""The tasks of a worker with many processes."""

import jobs

from reliq import Job, Nack, Tasks

app = Tasks("tasks", retries=5)


@app.task
def plain(number: int, step: int = 1) -> None:
    jobs.note("plain", f"{number + step}")


@app.task
async def coroutine(number: int) -> None:
    jobs.note("coroutine", f"{number}")


@app.task(timeout=60)
async def parent(job: Job, number: int) -> None:
    await plain.options(after=job).apublish(number, step=100)


@app.task
def resuming(job: Job, pages: int) -> None:
    for page in job.resume(range(pages)):
        jobs.note("pages", f"{job.attempt}: {page}")
        if job.attempt == 1 and page == 1:
            raise Nack(delay=0)
