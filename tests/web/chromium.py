"""A real browser."""

import shutil
from contextlib import contextmanager

from playwright.sync_api import sync_playwright
from required import must_run_in_ci


@contextmanager
def chromium():
    """A browser; without one the test is skipped, in CI it fails."""
    path = shutil.which("chromium")
    if path is None:
        must_run_in_ci("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
