"""The page of ``mo-fused report`` in a real browser without a network: drawn, hovered over, zoomed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from run_samples import detail, empty_run, faulty_run, make_run, old_run

from mo_fused.training.report import read_run, write_report
from mo_fused.training.report.page import page as page_of
from mo_fused.training.report.reading import NUMBERS, Run

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

# Where on the screen a step is in a chart: `axis` is "xaxis" and so on, and the height is the chart's middle.
PLACE = """([id, number, step]) => {
  const div = document.getElementById(id), layout = div._fullLayout, box = div.getBoundingClientRect();
  const x = layout["xaxis" + number], y = layout["yaxis" + number];
  return [box.x + x._offset + x.d2p(step), box.y + y._offset + y._length / 2];
}"""
RANGES = """id => Object.entries(document.getElementById(id)._fullLayout)
  .filter(([key]) => key.startsWith("xaxis")).map(([, axis]) => axis.range)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium has none for root
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-dev-shm-usage"])
        yield running
        running.close()


class Opened:
    """A page opened from the file system, and everything that went wrong on it."""

    def __init__(self, browser: Browser, file: Path) -> None:
        context = browser.new_context(viewport={"width": 1200, "height": 1000}, offline=True)
        self.page: Page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.file = file

    def hover(self, figure: str, number: str, step: float, expected: str) -> str:
        """What is shown, ``expected`` in it, with the pointer over a step in the chart ``number`` ("" is the first)."""
        self.page.locator(f"#{figure}").scroll_into_view_if_needed()
        self.page.mouse.move(0, 0)
        self.page.mouse.move(*self.page.evaluate(PLACE, [figure, number, step]))
        # The box is drawn a moment after the pointer has come to rest.
        shown = self.page.locator(f"#{figure} .hoverlayer").filter(has_text=expected)
        shown.wait_for(state="attached")
        return shown.text_content() or ""

    def close(self) -> None:
        assert self.wrong == []
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.file.as_uri()]
        self.page.context.close()


def test_two_runs_are_drawn_hovered_over_and_zoomed(tmp_path: Path, browser: Browser) -> None:
    good, bad = make_run(tmp_path / "good"), faulty_run(tmp_path / "bad")
    (file,), runs = write_report([good, bad])
    opened = Opened(browser, file)
    page = opened.page
    # Drawn: each run's loss and val_loss in the first chart; spike, finding, two skips and one not finite; a heat map a
    # norm and run.
    page.locator("#curves .subplot.xy .scatterlayer").wait_for()
    drawn = page.locator("#curves .subplot.xy path.js-line")
    assert drawn.count() == 4
    lengths = drawn.evaluate_all("paths => paths.map(path => path.getTotalLength())")
    assert min(lengths) > 500, lengths
    assert page.locator("#curves .legendtext").all_text_contents() == ["good", "bad"]
    markers = page.locator("#curves .subplot.xy .scatterlayer .trace").filter(has=page.locator("path.point"))
    assert sorted(markers.nth(i).locator("path.point").count() for i in range(markers.count())) == [1, 1, 1, 2, 4, 4]
    for figure in ("norms0", "norms1"):
        images = page.locator(f"#{figure} .heatmaplayer image")
        images.first.wait_for()
        assert images.count() == 2

    # Cells that are zero or not finite have the colours at the ends of the scale, which no other cell has.
    zero, low, nonfinite, high = page.evaluate(
        "() => (map => [map.z[2][1], map.zmin, map.z[4][2], map.zmax])(document.getElementById('norms1')._fullData[0])"
    )
    assert (zero, nonfinite) == pytest.approx((low, high), rel=1e-5)

    text = opened.hover("curves", "", 120, "step 120")
    assert "LossSpike: loss 9.5 is 6.1 times" in text and f"good loss : {runs[0].numbers['loss'][119]:.5g}" in text, (
        text
    )
    buttons = page.locator("#curves .modebar-btn").evaluate_all("all => all.map(button => button.dataset.title)")
    assert "Zoom" in buttons and not [title for title in buttons if "hare" in title or "loud" in title]

    before = page.evaluate(RANGES, "curves")
    assert all(low <= 1 and high >= 200 for low, high in before)
    (x, y), (to, _) = (page.evaluate(PLACE, ["curves", "", step]) for step in (50, 100))
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(to, y, steps=4)
    page.mouse.up()
    page.wait_for_function(f"([low]) => ({RANGES})('curves')[0][0] > low + 20", arg=before[0])
    zoomed = page.evaluate(RANGES, "curves")
    assert len(zoomed) == len(before) == 14
    for low, high in zoomed:
        assert (low, high) == pytest.approx((50, 100), abs=1)
    page.mouse.dblclick(to, y)
    page.wait_for_function(f"([low]) => ({RANGES})('curves')[0][0] == low", arg=before[0])

    # The chart's middle is its third row of five, blocks.0.bias; at 100 its gradient was exactly zero.
    assert "blocks.0.bias" in opened.hover("norms1", "", 100, "step 100: 0")
    opened.hover("norms1", "2", 150, "step 150: 0.03")
    page.locator("#curves .legendtoggle").first.click()
    page.wait_for_function("() => document.querySelectorAll('#curves .subplot.xy path.js-line').length == 2")
    opened.close()


def test_a_text_never_becomes_code(tmp_path: Path, browser: Browser) -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>&lt;"
    name = bad.replace("/", "\u2215")  # a file's name has no slash
    folder = make_run(
        tmp_path / "<script>alert(0)<",
        60,
        details=[{"step": 50, "parameters": {bad: {"grad_norm": 1.0, "update_norm": 1.0}}}],
        events=[{"step": 30, "watcher": "LossSpike", "message": bad, bad: [bad]}, {"step": 31, "message": "\ud800"}],
        config={bad: bad},
    )
    other = make_run(tmp_path / name, 60)
    (file,), _ = write_report([folder, other], tmp_path / "page.html")
    opened = Opened(browser, file)
    opened.page.locator("#norms0 .heatmaplayer image").first.wait_for()
    opened.page.locator("#curves .legendtext").first.wait_for()
    assert opened.page.locator("#curves .legendtext").all_text_contents() == ["<script>alert(0)<", name]
    opened.hover("curves", "", 30, bad)
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("#norms0 .ytick text").first.text_content() == bad
    assert opened.page.locator("td", has_text=bad).count() >= 2
    opened.close()


def test_an_empty_a_cut_and_an_old_run_over_each_other(tmp_path: Path, browser: Browser) -> None:
    folders = [empty_run(tmp_path / "empty"), make_run(tmp_path / "cut", cut=9), old_run(tmp_path / "old")]
    opened = Opened(browser, write_report(folders)[0][0])
    opened.page.locator("#curves .subplot.xy path.js-line").first.wait_for()
    assert opened.page.locator("#curves .subplot.xy path.js-line").count() == 4
    notes = opened.page.locator(".notes").text_content() or ""
    assert (
        "no step was recorded" in notes
        and "cut off and was not read (line 200)" in notes
        and "not recorded in this run" in notes
    )
    opened.close()
    alone = Opened(browser, write_report(folders[:1])[0][0])
    assert "No numbers were recorded." in (alone.page.locator("body").text_content() or "")
    alone.close()


def test_a_million_steps_open_with_every_spike(tmp_path: Path, browser: Browser) -> None:
    count = 1_000_000
    noise = np.random.default_rng(0)
    numbers = {key: noise.normal(10.0, 0.1, count) for key in NUMBERS if key != "skipped"}
    spikes = np.arange(250, count, 5000)
    numbers["loss"][spikes] = 1000.0
    numbers["skipped"] = np.zeros(count)
    numbers["skipped"][::100] = 1.0
    run = Run("long", tmp_path, np.arange(1, count + 1), numbers)
    run.events = [{"step": int(step) + 1, "watcher": "LossSpike", "message": "spike"} for step in spikes]
    details = [detail(step) for step in range(500, 200_001, 500)]
    run.layers = read_run(make_run(tmp_path / "r", 1, details=details)).layers
    file = tmp_path / "page.html"
    file.write_text(page_of([run], ["long"]))
    assert file.stat().st_size < 12e6
    opened = Opened(browser, file)
    opened.page.locator("#curves .subplot.xy path.js-line").first.wait_for()
    drawn: list[list[Any]] = opened.page.evaluate(
        "() => document.getElementById('curves')._fullData.map(trace => [trace.name, Array.from(trace.x), "
        "Array.from(trace.y)])"
    )
    loss = next((x, y) for name, x, y in drawn if name == "long loss")
    assert set(spikes + 1) <= {x for x, y in zip(*loss, strict=True) if y == 1000.0}
    assert [x for name, x, _ in drawn if name == "long loss spike"][0] == (spikes + 1).tolist()
    assert [len(x) for name, x, _ in drawn if name == "long skipped step"][0] == 2000
    text = opened.page.locator("body").inner_text()
    assert "thinned out" in text and "each says how many it stands for" in text
    opened.hover("curves", "", 500_201, "5 skipped steps from")
    opened.close()
