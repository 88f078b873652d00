"""A real browser for tests."""

import shutil
from contextlib import contextmanager

from required import module_of_ci, must_run_in_ci

#: A host name that the browser resolves to this machine, without the trust of localhost.
FAR_HOST = "ops.example.com"


@contextmanager
def chromium():
    """A browser; without a browser the test is skipped, in CI it fails."""
    path = shutil.which("chromium")
    if path is None:
        must_run_in_ci("there is no chromium: apt-get install chromium")
    with module_of_ci("playwright.sync_api").sync_playwright() as playwright:
        args = ["--no-sandbox", f"--host-resolver-rules=MAP {FAR_HOST} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=path, args=args)
        try:
            yield browser
        finally:
            browser.close()
