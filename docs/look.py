"""
Check the built site in Chromium, with the screen sizes of a desktop and a telephone: `python docs/look.py build/site`.

Each page must have a title and all its pictures, fit the screen without scrolling sideways, and run its scripts without an
error. On a desktop, the table of contents is visible. Each column of a table is wide enough for its longest word. Each
program fits the page of a desktop, and has a button that copies it without prompts and output. Each search in SEARCHES
finds its page first.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "web")]

from chromium import chromium  # noqa: E402  it is found by the line above

SCREENS = {"a desk": (1280, "light"), "a telephone": (390, "dark")}
#: Search words of readers -> the page that the search must list first.
SEARCHES = {
    "graceful shutdown": "production/workers",
    "rate limit": "guides/ordering",
    "deduplication": "guides/publishing",
    "unique job": "guides/publishing",
    "retry": "guides/handlers",
    "timeout": "guides/timeouts",
    "stuck": "guides/timeouts",
    "duplicate": "guides/publishing",
    "idempotent": "recipes/idempotency",
    "troubleshooting": "production/troubleshooting",
    "Sentry": "production/logging",
    "Kubernetes": "production/deployment",
    "FastAPI": "integrations/fastapi",
    "Django": "integrations/django",
    "testing": "guides/testing",
    "metrics": "production/monitoring",
    "delay": "guides/publishing",
    "cron": "guides/periodic",
    "dead letter": "guides/dead-letters",
    "dead letter queue": "guides/dead-letters",
    "failed jobs": "guides/dead-letters",
    "max retries": "guides/handlers",
    "throttle": "guides/ordering",
    "schedule": "guides/periodic",
    "cancel": "guides/publishing",
    "lost jobs": "internals/guarantees",
    "monitoring": "production/monitoring",
    "priority": "guides/ordering",
    "dashboard": "production/web",
    "sigterm": "production/workers",
    "exactly once": "guides/outbox",
    "celery": "migrating/celery",
    "extend_timeout": "reference/api",
}
#: A page with an interactive session: commands and their output.
SESSION = "recipes/tenants"
#: JavaScript that returns the faults of the open page as sentences.
LOOK = """() => {
  const wrong = []
  for (const part of document.querySelectorAll("html, .content")) {
    if (part.scrollWidth > part.clientWidth + 1) {
      const edge = part.getBoundingClientRect().left + part.clientWidth + 1
      const over = [...part.querySelectorAll("*")].find(one => one.getBoundingClientRect().right > edge)
      wrong.push(`it scrolls sideways: ${over ? over.outerHTML.slice(0, 120) : part.className}`)
      break
    }
  }
  if (!document.title || !document.querySelector("h1")) wrong.push("it has no title")
  for (const one of document.images) {
    if (!one.loading.startsWith("lazy") && one.complete && !one.naturalWidth) wrong.push(`${one.src} is no picture`)
    if (!one.alt) wrong.push(`${one.src} has no alternative text`)
  }
  const contents = document.querySelector(".toc-drawer:not(.no-toc)")
  if (contents && innerWidth > 1200) {
    const { width, right } = contents.getBoundingClientRect()
    if (!width || right > innerWidth) wrong.push("its contents are out of sight")
  }
  for (const cell of document.querySelectorAll("table.docutils td")) {
    const style = getComputedStyle(cell)
    const inner = cell.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)
    const letters = inner / (parseFloat(style.fontSize) / 2)
    if (letters < 8) wrong.push(`a cell has room for ${Math.floor(letters)} letters: ${cell.innerText.slice(0, 40)}`)
  }
  for (const program of document.querySelectorAll(".highlight")) {
    const output = program.parentElement.matches(".highlight-text")
    const { scrollWidth, clientWidth } = program.querySelector("pre")
    if (innerWidth > 1200 && scrollWidth > clientWidth && !program.parentElement.matches(".highlight-text, .highlight-console")) {
      wrong.push(`a program is wider than the page: ${program.innerText.slice(0, 40)}`)
    }
    if (output !== !program.querySelector("button.copybtn")) {
      wrong.push(`${output ? "output has a" : "a program has no"} button: ${program.innerText.slice(0, 40)}`)
    }
  }
  return wrong
}"""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site over HTTP while the block runs; yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def faults(site: Path) -> Iterator[str]:
    """Yield the faults of all pages, of the copy button and of the search."""
    left_out = {site / "index.html", site / "search.html"}  # it leads to another page; it is made by a script
    pages = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts and path not in left_out)
    if not pages:
        sys.exit(f"{site} is no site: .ci/docs builds it")
    failed: list[Exception] = []
    with served(site) as address, chromium() as browser:
        for name, (width, scheme) in SCREENS.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("pageerror", lambda error: failed.append(error))  # noqa: PLW0108  playwright sets an attribute of it
            for path in pages:
                page.goto(f"{address}/{path.relative_to(site)}")
                for wrong in [*page.evaluate(LOOK), *failed]:
                    yield f"{path.relative_to(site)} on {name}: {wrong}"
                failed.clear()
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        yield from copied(context.new_page(), address)
        yield from searched(context.new_page(), address)


def copied(page: Any, address: str) -> Iterator[str]:
    """Press the copy button of a session, and yield a fault if the clipboard has other lines than its commands."""
    page.goto(f"{address}/docs/{SESSION}.html")
    session = page.locator(".highlight-console").first
    shown = session.inner_text().splitlines()
    commands = [line[len(prompt) :] for line in shown for prompt in (">>> ", "$ ") if line.startswith(prompt)]
    session.hover()
    session.locator("button").click()
    taken = page.evaluate("navigator.clipboard.readText()").splitlines()
    if not commands or taken != commands:
        yield f"the button of a session of {SESSION} copies {taken}, not {commands}"


def searched(page: Any, address: str) -> Iterator[str]:
    """Run each search in SEARCHES, and yield a fault if its page is not the first result."""
    for words, wanted in SEARCHES.items():
        page.goto(f"{address}/search.html?q={quote_plus(words)}")
        page.wait_for_selector(".search-summary:not(:empty)")
        links = page.locator("ul.search > li > a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
        found = [link.partition("#")[0].removeprefix("docs/").removesuffix(".html") for link in links]
        if found[:1] != [wanted]:
            yield f"a search for {words} should find {wanted} first, but it finds {found[:3]}"


if __name__ == "__main__":
    sentences = list(faults(Path(sys.argv[1]).resolve()))
    sys.stdout.write(
        "\n".join(sentences or ["Every page fits a desk and a telephone, and every search finds its page."]) + "\n"
    )
    sys.exit(bool(sentences))
