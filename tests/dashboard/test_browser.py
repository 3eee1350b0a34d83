"""Headless Chromium walks every view on real recordings. Chromium itself: `apt-get install
chromium`.
"""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("playwright")

from playwright.sync_api import Browser, expect

from tests.dashboard.browser import CHROMIUM, PATIENCE_MS, TRY_AGAIN_MS, Visitor, browsing, serving
from tests.dashboard.cases import folder, made
from zlab.dashboard import data as archive
from zlab.traces.recording import TABLES, FolderRecorder, Recording

VIEWS = (
    ("Requests", "One request explained"),
    ("Compare", "The pools"),
    ("Trust", "Where they part"),
    ("Occupancy", "Who holds most"),
    ("Play", "Start from a policy file"),
    ("Live", "This run has come to its end"),
    ("Runs", "Chosen runs"),
)
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of recordings that the walk may add to."""
    target = tmp_path_factory.mktemp("walk") / "runs"
    shutil.copytree(made(), target)
    return target


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(params=["light", "dark"])
def themed(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Visitor]:
    page = browser.new_page(viewport={"width": 1440, "height": 1000}, color_scheme=request.param)
    visitor = Visitor(page, address)
    yield visitor
    page.close()
    assert visitor.complaints == []


@pytest.fixture
def visitor(browser: Browser, address: str) -> Iterator[Visitor]:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    found = Visitor(page, address)
    yield found
    page.close()
    assert found.complaints == []


def test_every_view_in_light_and_dark(themed: Visitor, request: pytest.FixtureRequest) -> None:
    theme = request.node.callspec.params["themed"]
    themed.open("?run=hybrid")
    for view, says in VIEWS if theme == "light" else VIEWS[::3]:
        themed.view(view)
        themed.shows(says)
        assert not themed.page.locator("[data-testid=stException]").count()
        themed.shot(f"{view}-{theme}")
    background = themed.page.evaluate(
        "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    )
    red = int(re.findall(r"\d+", background)[0])
    assert (red < 60) == (theme == "dark")


# Words of figures that cover each other, and those with too little contrast to the page.
LOOK_AT_WORDS = """() => {
  const part = value => { value /= 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; };
  const light = colour => { const [r, g, b] = colour.match(/[0-9.]+/g).map(Number).map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const page = light(
    getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor);
  const covered = [], faint = [];
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    const words = [...plot.querySelectorAll('.main-svg text')].filter(
      text => text.textContent.trim() && !text.closest('.hoverlayer'));
    const boxes = words.map(text => text.getBoundingClientRect());
    words.forEach((text, i) => {
      const ink = light(getComputedStyle(text).fill);
      const ratio = (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
      if (ratio < 4.5 && !text.closest('.heatmap-label')) faint.push(text.textContent);
      for (let j = i + 1; j < words.length; j++) {
        const [a, b] = [boxes[i], boxes[j]];
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 2 && down > 3) covered.push([text.textContent, words[j].textContent]);
      }
    });
  }
  const main = document.querySelector('[data-testid=stMain]');
  return [main.scrollWidth - main.clientWidth, covered, faint];
}"""


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light"), (1920, "dark")])
def test_words_are_neither_covered_nor_faint(
    browser: Browser, address: str, width: int, theme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=theme)
    visitor = Visitor(page, address)
    for view in ("Occupancy", "Requests", "Compare", "Live") if width == 390 else ("Compare",):
        visitor.open(f"?view={view}&run=hybrid", phone=width < 700)
        visitor.box(page.locator(".js-plotly-plot").last)
        assert page.evaluate(LOOK_AT_WORDS) == [0, [], []], (view, width)
    assert visitor.complaints == []
    page.close()


def test_zoom_by_a_box_brings_detail_and_a_link(visitor: Visitor, browser: Browser) -> None:
    visitor.open("?run=hybrid&view=Occupancy")
    plot = visitor.page.locator(".js-plotly-plot").first

    def drag() -> None:
        area = visitor.box(plot.locator(".nsewdrag").first)
        x, y = area["x"] + area["width"] * 0.3, area["y"] + area["height"] * 0.2
        visitor.page.mouse.move(x, y)
        visitor.page.mouse.down()
        visitor.page.mouse.move(x + 60, y + 40, steps=4)
        visitor.page.mouse.move(x + 200, y + 120, steps=4)
        visitor.page.mouse.up()

    visitor.until(drag, lambda: visitor.leads(lambda link: "from" in link, TRY_AGAIN_MS))
    link = visitor.leads(lambda link: {"from", "to", "first", "last"} <= set(link))
    assert link["run"] == "hybrid"
    last = Recording(folder("hybrid")).manifest["summary"]["makespan_s"]
    assert 0.2 * last < float(link["from"]) < float(link["to"]) < 0.6 * last
    assert 10 < int(link["first"]) < int(link["last"]) < 80
    visitor.shows(f"blocks {link['first']} to {link['last']} of 96")
    visitor.shot("zoomed")
    other = Visitor(browser.new_page(), visitor.address)
    other.open(
        "?" + urlsplit(visitor.page.url).query
    )  # the link alone brings a reader to the same place
    other.shows(f"blocks {link['first']} to {link['last']} of 96")
    other.page.close()
    whole = visitor.page.get_by_role("button", name="Show the whole run")
    visitor.until(whole.click, lambda: visitor.leads(lambda link: "from" not in link, TRY_AGAIN_MS))
    visitor.shows("blocks 0 to 95 of 96")


def test_the_pointer_is_told_what_a_block_is(visitor: Visitor) -> None:
    visitor.open("?run=hybrid&view=Occupancy&first=10&last=30")
    plot = visitor.page.locator(".js-plotly-plot").first

    def point() -> None:
        area = visitor.box(plot.locator(".nsewdrag").first)
        visitor.page.mouse.move(
            area["x"] + area["width"] * 0.3 - 1, area["y"] + area["height"] * 0.5
        )
        visitor.page.mouse.move(area["x"] + area["width"] * 0.3, area["y"] + area["height"] * 0.5)

    says = re.compile(r"block 2\d: (owned|shared|free|cached|compression)")
    said = visitor.page.locator(".hoverlayer").first
    visitor.until(point, lambda: expect(said).to_contain_text(says, timeout=TRY_AGAIN_MS))
    visitor.shot("hover", full=False)


def test_colours_requests_and_stories_by_click(visitor: Visitor) -> None:
    visitor.open("?run=hybrid&view=Occupancy")
    visitor.choose("request")
    visitor.leads(lambda link: link.get("colour") == "request")
    visitor.shot("by-request")
    layers = visitor.page.locator(".js-plotly-plot").nth(2)
    layers.scroll_into_view_if_needed()
    area = visitor.box(layers.locator(".nsewdrag").first)
    shares = iter(
        (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    )  # down through the layers until one answers

    def click() -> None:
        at = area["y"] + area["height"] * (1 - next(shares))
        visitor.page.mouse.click(area["x"] + area["width"] * 0.5, at)

    visitor.until(click, lambda: visitor.leads(lambda link: "request" in link, TRY_AGAIN_MS))
    visitor.page.get_by_text(re.compile(r"Blocks of r\d+ in orange")).first.wait_for()
    number = visitor.query["request"]
    visitor.shows(f"Blocks of r{number} in orange")
    visitor.view("Requests")
    visitor.shows(f"r{number} took")
    expect(visitor.page.get_by_label("Request", exact=True)).to_have_value(number)
    visitor.shot("story")


def test_downloads(visitor: Visitor, tmp_path: Path) -> None:
    visitor.open("?run=hybrid&view=Requests")
    visitor.page.get_by_text("Export").first.click()
    begins_with = {
        "requests (CSV)": b"number",
        "Trace for Perfetto": b'{"displayTimeUnit"',
        "Recording (zip)": b"PK",
        "Figures (HTML)": b"<!doctype html>",
    }
    for label, begins in begins_with.items():
        with visitor.page.expect_download() as started:
            visitor.page.get_by_role("button", name=label).click()
        path = tmp_path / "file"
        started.value.save_as(path)
        assert path.read_bytes().startswith(begins)


def test_uploads(visitor: Visitor, tmp_path: Path) -> None:
    visitor.open("?view=Occupancy&run=full-kv")
    whole = tmp_path / "mine.zip"
    whole.write_bytes(archive.pack(Path(folder("swapping"))))
    upload = visitor.page.locator("[data-testid=stSidebar] input[type=file]")
    upload.set_input_files(whole)
    visitor.page.locator("[data-testid=stSidebar]").get_by_text("mine.zip").first.wait_for()
    visitor.settle()
    option = visitor.page.get_by_role("option", name=re.compile("uploaded-mine"))

    def pick() -> None:
        visitor.page.keyboard.press("Escape")  # a list that is still open from before
        visitor.page.locator("[data-testid=stSidebar] [data-testid=stSelectbox]").click()
        option.click(timeout=TRY_AGAIN_MS)

    visitor.until(
        pick,
        lambda: visitor.leads(lambda link: link["run"].startswith("uploaded-mine"), TRY_AGAIN_MS),
    )
    huge = tmp_path / "huge.zip"
    with huge.open("wb") as file:
        file.truncate(200_000_000)
    upload.set_input_files(huge)
    visitor.shows("50.0MB or smaller")
    visitor.shot("too-large")


def test_play_runs_and_cancels(visitor: Visitor) -> None:
    visitor.open("?view=Play&recipe=fixed+lengths&count=20000&rate=1000&num_blocks=64")
    visitor.page.get_by_role("button", name="Run", exact=True).click()
    visitor.shows("Running hybrid")
    visitor.page.get_by_role("progressbar").first.wait_for()
    visitor.shot("running")
    cancel = visitor.page.get_by_role("button", name="Cancel")  # drawn anew twice a second
    cancelled = visitor.page.get_by_text("Cancelled after").first
    visitor.until(
        lambda: cancel.click(timeout=TRY_AGAIN_MS), lambda: cancelled.wait_for(timeout=TRY_AGAIN_MS)
    )
    visitor.open("?view=Play&most=12&num_blocks=128")
    visitor.page.get_by_role("button", name="Run", exact=True).click()
    visitor.shows("Done. The recording is in")
    visitor.settle()
    visitor.shot("played")


def test_live_follows_without_a_jump(visitor: Visitor, root: Path) -> None:
    source = Recording(folder("hybrid"))
    recorder = FolderRecorder(
        root / "growing", source.manifest | {"complete": False, "summary": None}, rows_per_part=1
    )
    tables = {name: source.table(name) for name in TABLES}

    def grow(low: float, high: float) -> None:
        for name in ("events", "blocks", "steps"):
            rows = tables[name].num_rows
            part = tables[name].slice(int(rows * low), int(rows * high) - int(rows * low))
            recorder.write(name, {column: part[column] for column in part.column_names})

    def num_steps() -> int:
        return int((steps.text_content() or "0").replace(",", ""))

    grow(0.0, 0.2)
    visitor.open("?view=Live&run=growing&every=1")
    visitor.shows("This run is being written")
    steps = (
        visitor.page.locator("[data-testid=stMetric]")
        .filter(has_text="Steps")
        .locator("[data-testid=stMetricValue]")
    )
    expect(steps).to_have_text(re.compile(r"^[\d,]+$"))
    before = num_steps()

    def wait_for_more_than(number: int) -> None:
        until = time.monotonic() + PATIENCE_MS / 1000
        while num_steps() <= number:
            assert time.monotonic() < until
            visitor.page.wait_for_timeout(200)

    grow(0.2, 0.3)
    wait_for_more_than(before)  # a first refresh has come: the page itself is all there
    figures = visitor.page.locator(".js-plotly-plot")
    expect(figures).to_have_count(2)
    visitor.box(figures.last)
    visitor.page.locator("[data-testid=stMain]").evaluate("element => element.scrollTo(0, 250)")
    place = visitor.page.locator("[data-testid=stMain]").evaluate("element => element.scrollTop")
    assert place > 0
    # A refresh that is overtaken takes the figures away for a moment: the page stays as high as it
    # was.
    gone = visitor.page.add_style_tag(
        content="[data-testid=stMainBlockContainer] > * { display: none }"
    )
    visitor.page.wait_for_timeout(100)
    assert (
        visitor.page.locator("[data-testid=stMain]").evaluate("element => element.scrollTop")
        == place
    )
    gone.evaluate("element => element.remove()")
    for tenth in range(3, 10):
        grow(tenth / 10, (tenth + 1) / 10)
        visitor.page.wait_for_timeout(200)  # as a run would: a part now and then
    wait_for_more_than(2 * before)
    visitor.page.wait_for_function(  # the figures have come along, too
        "seconds => document.querySelector('.js-plotly-plot')?.layout?.xaxis?.range?.[1] > seconds",
        arg=10.0,
    )
    assert (
        visitor.page.locator("[data-testid=stMain]").evaluate("element => element.scrollTop")
        == place
    )
    visitor.shot("live", full=False)
    recorder.close(complete=True, summary=source.manifest["summary"])
    visitor.shows("This run has come to its end")
    shutil.rmtree(root / "growing")


def test_a_broken_recording_in_the_browser(visitor: Visitor, root: Path) -> None:
    shutil.copytree(made() / "hybrid", root / "broken")
    part = root / "broken" / "blocks" / "00000.parquet"
    part.write_bytes(part.read_bytes()[:1000])
    visitor.open("?view=Occupancy&run=broken")
    visitor.shows("broken cannot be shown")
    visitor.shows("Choose another recording on the left")
    visitor.shot("broken")
    shutil.rmtree(root / "broken")
