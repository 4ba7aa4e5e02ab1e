"""Headless Chromium for tests marked `browser`."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def headless() -> Iterator[Any]:
    """A browser that keeps its console and its requests; closed in the end."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    from selenium.webdriver.chrome.service import Service

    program = shutil.which("chromedriver")
    chromium = shutil.which("chromium")
    if program is None or chromium is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(program))
    yield started
    started.quit()
