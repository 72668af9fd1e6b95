"""Pages in headless Chromium, driven by Playwright."""

import shutil
from typing import Any

import pytest

try:
    from playwright.sync_api import Page, expect, sync_playwright
except ImportError:  # no dependency
    Page = expect = sync_playwright = None
else:
    expect.set_options(timeout=60_000)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def needs_chromium(test: Any) -> Any:
    missing = CHROMIUM is None or sync_playwright is None
    return pytest.mark.optional(pytest.mark.skipif(missing, reason="needs chromium and playwright")(test))


def launched(playwright: Any) -> Any:
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    return playwright.chromium.launch(executable_path=CHROMIUM, args=options)


def visit(page: Page, url: str, name: str = "atlas") -> None:
    """Open a page, and wait until the object of this name says that it is ready, or that it never will be."""
    page.goto(url)
    late = "new Promise((_, reject) => setTimeout(reject, 60_000, 'never ready'))"
    page.evaluate(f"Promise.race([{name}.ready.then(() => {{}}, () => {{}}), {late}])")


def complaints(page: Page) -> list[str]:
    """Return errors and warnings of the console, and exceptions."""
    said = [message.text for message in page.console_messages() if message.type != "info"]
    return said + [str(error) for error in page.page_errors()]
