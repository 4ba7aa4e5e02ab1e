"""The site in headless Chromium, from a folder: every live figure asks, then moves by keyboard; no
error, no request to a host.

Run with `pytest -m browser tests/site`. Needs chromium and chromedriver, and Python's selenium.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import headless

from minidist import lessons
from minidist.site.__main__ import build
from minidist.site.live import Live, every
from minidist.site.pages import LANGUAGES, say

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    build(out)
    return out


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    yield from headless()


def opened(driver: Any, page: Path, width: int) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    driver.get_log("browser"), driver.get_log("performance")
    driver.get(page.as_uri())


def assert_quiet(driver: Any) -> None:
    """No error, and nothing asked of a host."""
    assert driver.get_log("browser") == []
    told = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]
    asked = [
        m["params"]["request"]["url"] for m in told if m["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def page_of(site: Path, language: str, figure: Live) -> Path:
    folder = lessons.find(figure.lesson).folder.name
    return site / language / "lessons" / folder / "README.html"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_asks_and_then_moves(
    driver: Any, site: Path, language: str, width: int
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    for figure in every(say(language)):
        opened(driver, page_of(site, language, figure), width)
        box = driver.find_element(By.ID, f"live-{figure.name}")
        sliders = box.find_elements(By.CSS_SELECTOR, "input[type=range]")
        assert len(sliders) == len(figure.controls)
        assert not any(slider.is_enabled() for slider in sliders)
        radios = box.find_elements(By.CSS_SELECTOR, "input[type=radio]")
        driver.execute_script("arguments[0].focus()", radios[figure.predict.right])
        radios[figure.predict.right].send_keys(Keys.SPACE)
        assert figure.predict.why in box.text
        assert all(slider.is_enabled() for slider in sliders)
        seen = {picture(driver, box)}
        for slider in sliders:
            for key in (Keys.HOME, Keys.END):
                slider.send_keys(key)
                seen.add(picture(driver, box))
        assert len(seen) > 1, figure.name
        assert_quiet(driver)


def picture(driver: Any, box: Any) -> str:
    return driver.execute_script("return arguments[0].querySelector('svg').innerHTML", box)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_screen(driver: Any, site: Path, language: str, width: int) -> None:
    for page in ("index.html", "docs/quickstart.html", "lessons/03_ring/README.html"):
        opened(driver, site / language / page, width)
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width, page
        assert_quiet(driver)


@pytest.mark.parametrize(("language", "word"), [("en", "bottleneck"), ("zh", "流水线")])
def test_a_word_is_found(driver: Any, site: Path, language: str, word: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    opened(driver, site / language / "search.html", 1280)
    driver.get(f"{(site / language / 'search.html').as_uri()}?q={word}")
    WebDriverWait(driver, 20).until(
        lambda _: driver.find_elements(By.CSS_SELECTOR, "#search-results li a")
    )
    assert_quiet(driver)


def test_the_first_page_leads_to_a_language(driver: Any, site: Path) -> None:
    opened(driver, site / "index.html", 1280)
    assert driver.current_url.endswith(("/en/index.html", "/zh/index.html"))
    assert_quiet(driver)
