"""
Open every page of the built site in Chromium, on a desk and on a telephone: `python docs/look.py build/site`.

A page has a title and all its pictures, fits the screen without scrolling sideways, and no program in it fails.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "web")]

from chromium import chromium  # noqa: E402  it is found by the line above

SCREENS = {"a desk": (1280, "light"), "a telephone": (390, "dark")}
#: What is wrong with the page that is open, as sentences.
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
  return wrong
}"""


def faults(site: Path) -> Iterator[str]:
    """Yield what is wrong, page by page."""
    left_out = {site / "index.html", site / "search.html"}  # it leads to another page; it is made by a program
    pages = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts and path not in left_out)
    if not pages:
        sys.exit(f"{site} is no site: .ci/docs builds it")
    failed: list[Exception] = []
    with chromium() as browser:
        for name, (width, scheme) in SCREENS.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("pageerror", lambda error: failed.append(error))  # noqa: PLW0108  playwright sets an attribute of it
            for path in pages:
                page.goto(path.as_uri())
                for wrong in [*page.evaluate(LOOK), *failed]:
                    yield f"{path.relative_to(site)} on {name}: {wrong}"
                failed.clear()


if __name__ == "__main__":
    sentences = list(faults(Path(sys.argv[1]).resolve()))
    sys.stdout.write("\n".join(sentences or ["Every page fits a desk and a telephone."]) + "\n")
    sys.exit(bool(sentences))
