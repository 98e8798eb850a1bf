"""Headless Chromium, to see pages as people do."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def why_not() -> str | None:
    """What is missing, if anything."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed"
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"there is no {' and no '.join(missing)}" if missing else None


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 1200) -> Iterator[Any]:
    """A browser with an empty profile, gone at the end of the block.

    Yields
    ------
    selenium.webdriver.Chrome
        Its calls block: beside an event loop, they belong into a thread.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


TEXT = """
const leaves = (root) => [...root.children].flatMap((element) =>
  element.shadowRoot ? leaves(element.shadowRoot)
  : element.children.length ? leaves(element) : [element.textContent]);
return leaves(document.body).join(String.fromCharCode(10));
"""


def text(driver: Any) -> str:
    """The words of the page that a browser shows, also in the trees that Bokeh hides from CSS.

    One line for each innermost element; those on canvases are not among them.
    """
    return driver.execute_script(TEXT)
