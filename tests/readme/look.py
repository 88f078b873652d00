"""
Open every page of the built site in Chromium, on a desk and on a telephone: `python tests/readme/look.py build/site`.

A page has a title and all its pictures, fits the screen without scrolling sideways, and no program in it fails.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "web")]

from chromium import chromium  # noqa: E402  it is found by the line above

SCREENS = {"a desk": (1280, "light"), "a telephone": (390, "dark")}
#: What is wrong with the page that is open, as sentences.
LOOK = """() => {
  const wrong = [], wide = document.documentElement.scrollWidth, screen = document.documentElement.clientWidth
  if (wide > screen) {
    const over = [...document.querySelectorAll("main *")].filter(one => one.getBoundingClientRect().right > screen + 1)
    wrong.push(`it is ${wide} pixels wide: ${over.length ? over.at(-1).outerHTML.slice(0, 120) : "?"}`)
  }
  if (!document.title || !document.querySelector("h1")) wrong.push("it has no title")
  for (const one of document.images) {
    if (!one.loading.startsWith("lazy") && one.complete && !one.naturalWidth) wrong.push(`${one.src} is no picture`)
    if (!one.alt) wrong.push(`${one.src} has no alternative text`)
  }
  return wrong
}"""


def faults(site):
    """Yield what is wrong, page by page."""
    pages = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts and path != site / "index.html")
    assert len(pages) > 20, f"{site} is no site: .ci/docs builds it"
    with chromium() as browser:
        for name, (width, scheme) in SCREENS.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            failed = []
            page.on("pageerror", failed.append)
            for path in pages:
                page.goto(path.as_uri())
                for wrong in [*page.evaluate(LOOK), *failed]:
                    yield f"{path.relative_to(site)} on {name}: {wrong}"
                failed.clear()


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]).resolve()))
    print("\n".join(found) or "Every page fits a desk and a telephone.")
    sys.exit(bool(found))
