"""The page in headless Chromium: no error and no request, every chart drawn, each control used,
also by keyboard.

Run with `pytest -m browser tests/observe/report`. Needs chromium and chromedriver, and Python's
selenium. `--basetemp DIR` keeps the screenshots that test_it_fits_every_screen takes.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import headless
from report_runs import write_run

from minidist.cli import main

pytestmark = pytest.mark.browser
CHARTS = [
    "losses",
    "seconds",
    "timeline",
    "overlap",
    "causes",
    "rank_steps",
    "rank_memory",
    "stragglers",
    "memory",
    "memory_step",
    "traffic",
    "watts",
]
TRAIN = [
    "train",
    "-n",
    "4",
    "--transport",
    "threads",
    "--steps",
    "8",
    "--batch",
    "8",
    "--context",
    "16",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--plan",
    "dp=2,pp=2",
    "--why",
    "--quiet",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("browser") / "run"
    assert main([*TRAIN, "--out", str(run)]) == 0
    _give_memory(run)
    assert main(["report", str(run)]) == 0
    return run / "report.html"


def _give_memory(run: Path) -> None:
    """Made-up bytes: ranks that are threads record no memory of their own, and processes start
    slowly."""
    for rank, file in enumerate(sorted((run / "steps").iterdir())):
        about, *lines = map(json.loads, file.read_text().splitlines())
        steps = [line | {"rss": (80 + rank * line["step"] << 20)} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in (about, *steps)))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    yield from headless()


def opened(driver: Any, page: Path, *, width: int = 1280, scheme: str = "light") -> Any:
    """The page, once every chart is drawn."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    in_scheme(driver, scheme)
    driver.get_log("browser"), driver.get_log("performance")
    driver.get(page.as_uri())
    all_drawn(driver)
    return driver


def in_scheme(driver: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def all_drawn(driver: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20).until(
        lambda _: driver.execute_script(
            "return [...document.querySelectorAll('.chart')].every((box) => box.dataset.drawn "
            "=== 'yes')"
        )
    )


def chart(key: str) -> str:
    """JavaScript: the instance of a chart."""
    return f"echarts.getInstanceByDom(document.querySelector('[data-chart={key}] .chart'))"


def zoomed(driver: Any) -> tuple[float, float]:
    found = driver.execute_script(
        f"const z = {chart('timeline')}.getOption().dataZoom[0]; return [z.start, z.end]"
    )
    return tuple(found)


def spans(driver: Any) -> int:
    return driver.execute_script(f"return {chart('timeline')}.getOption().series[0].data.length")


def control(driver: Any, key: str, name: str) -> Any:
    """The control of a chart by the text of its label or button."""
    from selenium.webdriver.common.by import By

    box = driver.find_element(By.CSS_SELECTOR, f"[data-chart={key}] .controls")
    return next(
        found
        for found in box.find_elements(By.CSS_SELECTOR, "button, label")
        if name in (found.get_attribute("aria-label"), found.text.strip().split("\n")[0])
        or found.text.strip() == name
    )


def choose(driver: Any, key: str, name: str, value: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    Select(control(driver, key, name).find_element(By.TAG_NAME, "select")).select_by_value(value)
    all_drawn(driver)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_every_screen(
    driver: Any, page: Path, width: int, scheme: str, tmp_path: Path
) -> None:
    opened(driver, page, width=width, scheme=scheme)
    assert driver.get_log("browser") == []
    urls = [
        message["params"]["request"]["url"]
        for entry in driver.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if not url.startswith("data:")] == [page.as_uri()]
    assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    keys = driver.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map((f) => f.dataset.chart)"
    )
    assert keys == CHARTS
    for key in CHARTS:  # more than the paper's one colour
        colours = driver.execute_script(
            f"const c = document.querySelector('[data-chart={key}] canvas'), p = "
            "c.getContext('2d');const d = new Uint32Array(p.getImageData(0, 0, c.width, "
            "c.height).data.buffer); return new Set(d).size"
        )
        assert colours > 20, key
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
    (tmp_path / f"report-{width}-{scheme}.png").write_bytes(base64.b64decode(shot))


def test_the_colour_scheme_may_change_while_it_is_open(driver: Any, page: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    opened(driver, page)
    ink = f"return {chart('losses')}.getOption().textStyle.color"
    before = driver.execute_script(ink)
    in_scheme(driver, "dark")
    WebDriverWait(driver, 10).until(lambda _: driver.execute_script(ink) != before)
    all_drawn(driver)


def test_buttons_and_keys_zoom_and_move(driver: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(driver, page)
    box = driver.find_element("css selector", "[data-chart=timeline] .chart")
    keys = {
        "zoom in": "+",
        "zoom out": "-",
        "move right": Keys.ARROW_RIGHT,
        "move left": Keys.ARROW_LEFT,
        "whole step": "0",
    }
    for press in (
        lambda name: control(driver, "timeline", name).click(),
        lambda name: box.send_keys(keys[name]),
    ):
        assert zoomed(driver) == (0, 100)
        press("zoom in")
        assert zoomed(driver) == (25, 75)
        press("move right")
        assert zoomed(driver) == (37.5, 87.5)
        press("move left")
        press("zoom out")
        assert zoomed(driver) == (0, 100)
        press("zoom in")
        press("zoom in")
        press("whole step")
    assert zoomed(driver) == (0, 100)


def test_every_control_is_reached_by_keyboard(driver: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(driver, page)
    reached = []
    driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    body = driver.find_element("css selector", "body")
    body.send_keys(Keys.TAB)
    for _ in range(220):
        found = driver.execute_script(
            "const a = document.activeElement; return a === document.body ? '' : "
            "(a.closest('[data-chart]') || {dataset: {}}).dataset.chart + ' ' + a.tagName"
        )
        reached.append(found)
        driver.switch_to.active_element.send_keys(Keys.TAB)
    assert {f"{key} DIV" for key in CHARTS} <= {*reached}
    assert {
        "timeline SELECT",
        "timeline INPUT",
        "timeline BUTTON",
        "timeline SUMMARY",
        "overlap SELECT",
        "rank_steps SELECT",
        "memory_step SELECT",
        "traffic SELECT",
    } <= {*reached}


def test_the_chosen_step_is_shown_by_timeline_and_causes(driver: Any, page: Path) -> None:
    opened(driver, page)
    choose(driver, "timeline", "step", "3")
    text = driver.find_element("css selector", "[data-chart=overlap] .beside").text
    assert "in step 3" in text
    choose(driver, "overlap", "step", "5")
    assert (
        control(driver, "timeline", "step")
        .find_element("tag name", "select")
        .get_attribute("value")
        == "5"
    )
    most = driver.execute_script(f"return {chart('timeline')}.getOption().xAxis[0].max")
    numbers = json.loads(
        driver.execute_script("return document.getElementById('numbers').textContent")
    )
    assert [step["us"] / 1e3 for step in numbers["timeline"]["steps"] if step["step"] == 5] == [
        most
    ]


def test_ranks_and_lanes_are_filtered(driver: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(driver, page)
    everything = spans(driver)
    field = control(driver, "timeline", "ranks").find_element("tag name", "input")

    def ranks(text: str) -> list[str]:
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text, Keys.ENTER)
        all_drawn(driver)
        return sorted(
            {
                name.split()[0]
                for name in driver.execute_script(
                    f"return {chart('timeline')}.getOption().yAxis[0].data"
                )
            }
        )

    assert ranks("0,2-3") == ["0", "2", "3"] and spans(driver) < everything
    assert ranks("nobody") == ["0", "2", "3"] and field.get_attribute("aria-invalid") == "true"
    assert ranks("17") == ["0", "2", "3"] and field.get_attribute("aria-invalid") == "true"
    assert ranks("all") == ["0", "1", "2", "3"] and spans(driver) == everything
    assert field.get_attribute("aria-invalid") == "false"
    control(driver, "timeline", "compute").click()
    all_drawn(driver)
    assert 0 < spans(driver) < everything
    count = f"return {chart('timeline')}.getOption().series[1].data.length"
    assert driver.execute_script(count) > 0
    control(driver, "timeline", "arrows").click()
    all_drawn(driver)
    assert driver.execute_script(count) == 0


def test_the_spans_are_a_table_too(driver: Any, page: Path) -> None:
    opened(driver, page)
    driver.find_element("css selector", "[data-chart=timeline] summary").click()
    rows = driver.execute_script(
        "return document.querySelectorAll('[data-chart=timeline] details tr').length"
    )
    assert rows == 1 + min(500, spans(driver))


def test_memory_and_traffic_follow_their_controls(driver: Any, page: Path) -> None:
    opened(driver, page)
    held = (
        f"return JSON.stringify({chart('memory_step')}.getOption().series.map((one) => one.data))"
    )
    seen = {driver.execute_script(held)}
    choose(driver, "memory_step", "rank", "3")
    seen.add(driver.execute_script(held))
    choose(driver, "memory_step", "step", "0")
    seen.add(driver.execute_script(held))
    assert len(seen) == 3
    cells = f"return {chart('traffic')}.getOption().series[0].data"
    by_axis = {}
    for axis in ("all", "dp", "pp"):
        choose(driver, "traffic", "axis", axis)
        by_axis[axis] = sum(cell[2] for cell in driver.execute_script(cells))
    assert by_axis["all"] > by_axis["dp"] > by_axis["pp"] > 0


def test_the_steps_of_each_rank_follow_their_control(driver: Any, page: Path) -> None:
    opened(driver, page)
    numbers = json.loads(
        driver.execute_script("return document.getElementById('numbers').textContent")
    )["rank_steps"]
    for name, value in numbers["values"].items():
        choose(driver, "rank_steps", "value", name)
        cells = driver.execute_script(f"return {chart('rank_steps')}.getOption().series[0].data")
        assert {(at, place): found for at, place, found in cells} == {
            (at, place): found
            for place, row in enumerate(value["rows"])
            for at, found in enumerate(row)
        }
    assert {"own computation", "waiting for data", "in calls", "whole step"} <= {*numbers["values"]}
    lines = driver.execute_script(
        f"return {chart('rank_memory')}.getOption().series.map((one) => one.name)"
    )
    assert lines == [f"rank {rank}" for rank in range(4)]


def test_the_tooltip_shows_a_span_as_text(driver: Any, page: Path) -> None:
    opened(driver, page)
    driver.execute_script(
        f"{chart('timeline')}.dispatchAction({{type: 'showTip', seriesIndex: 0, dataIndex: 0}})"
    )
    text = driver.execute_script(
        "return document.querySelector('[data-chart=timeline] .tip').textContent"
    )
    assert "rank" in text and " ms long" in text


def test_a_page_of_a_villain_and_a_page_of_a_run_that_died(driver: Any, tmp_path: Path) -> None:
    for number, without in enumerate(((), ("metrics.json",), ("trace.json",), ("metrics.jsonl",))):
        run = write_run(tmp_path / f"run {number} <b>", without=without)
        assert main(["report", str(run)]) == 0
        opened(driver, run / "report.html")
        assert driver.get_log("browser") == [] and driver.execute_script(
            "return window.broken === undefined"
        )
