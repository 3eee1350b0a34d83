"""A real browser before a real server: Debian's Chromium, driven by Playwright, and the dashboard
as a process.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from playwright.sync_api import Browser, FloatRect, Locator, Page, Request, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 120_000  # for what must come; a CI machine may have other work than ours
TRY_AGAIN_MS = 5_000  # for what a page that is being drawn anew may have missed: a click, a hover
MOST_STARTS = 5
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def serving(*roots: Path) -> Iterator[str]:
    """The dashboard on these folders; yields its address."""
    with (roots[0] / "server.log").open("wb") as log:
        port, server = _started(roots, log)
        with server:
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()
                try:
                    server.wait(PATIENCE_MS / 1000)
                except subprocess.TimeoutExpired:
                    server.kill()


def _started(roots: tuple[Path, ...], log: IO[bytes]) -> "tuple[int, subprocess.Popen[bytes]]":
    """A server that answers, and its port; another if somebody was faster to take the port that was
    free just now.
    """
    for _ in range(MOST_STARTS):
        port = free_port()
        command = [
            sys.executable, "-m", "streamlit", "run", "dashboard", "--server.headless", "true",
            "--server.address", "127.0.0.1", "--server.port", str(port), "--", *map(str, roots),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        if _answers(f"http://127.0.0.1:{port}/_stcore/health", server):
            return port, server
        server.kill()
        server.wait()
    raise RuntimeError(
        f"the dashboard did not start: {Path(log.name).read_text(errors='replace')[-2000:]}"
    )


def _answers(url: str, server: "subprocess.Popen[bytes]") -> bool:
    until = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < until and server.poll() is None:
        try:
            with urlopen(url, timeout=10):
                return server.poll() is None
        except OSError:
            time.sleep(0.2)
    return False


@contextmanager
def browsing() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visitor:
    """One reader's tab, and everything its console complained about."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.on("requestfailed", self._note_failed)

    def _note_failed(self, request: Request) -> None:
        if (
            request.failure != "net::ERR_ABORTED"
        ):  # that is a reader who has gone on to another page
            self.complaints.append(f"failed: {request.url}: {request.failure}")

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(text)

    def open(self, query: str = "", phone: bool = False) -> None:
        """Go to an address and wait until the page is drawn; a phone hides the sidebar."""
        self.page.goto(f"{self.address}/{query}")
        seen = self.page.get_by_text("Zipage Lab", exact=True).first
        seen.wait_for(state="attached" if phone else "visible")
        self.settle()

    def settle(self) -> None:
        """Wait until the server says that it has drawn the page, and every figure is there.

        Just after a click it may not have begun yet: what must come of the click is to be waited
        for by itself.
        """
        self.page.wait_for_function(
            "() => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === "
            "'notRunning'"
            " && [...document.querySelectorAll('.js-plotly-plot')].every(plot => "
            "plot.querySelector('.main-svg'))"
        )

    def view(self, name: str) -> None:
        """Choose a view by its button."""
        self.choose(name)

    def choose(self, name: str) -> None:
        """Choose a segment of a control by its words, and wait until it is the chosen one."""
        segment = self.page.get_by_role("radio", name=name, exact=True)
        self.until(segment.click, lambda: expect(segment).to_be_checked(timeout=TRY_AGAIN_MS))
        self.settle()

    def until(self, does: Callable[[], object], comes: Callable[[], object]) -> None:
        """Do something, again and again if it goes unheard, until something comes of it.

        `comes` waits for a little while and raises, as Playwright's own waits and assertions do,
        when it has not come.
        """
        until = time.monotonic() + PATIENCE_MS / 1000
        while True:
            try:
                does()
                comes()
            except (PlaywrightError, AssertionError):
                if time.monotonic() > until:
                    raise
            else:
                return

    @property
    def query(self) -> dict[str, str]:
        """The page's address, as names and values."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).query).items()}

    def leads(
        self, condition: Callable[[dict[str, str]], object], timeout_ms: float = PATIENCE_MS
    ) -> dict[str, str]:
        """Wait until the page's address is as it should be; returns its names and values."""
        self.page.wait_for_url(
            lambda url: bool(
                condition(
                    {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
                )
            ),
            timeout=timeout_ms,
            wait_until="commit",
        )
        return self.query

    def box(self, inside: Locator) -> FloatRect:
        """Where something lies in the window, once it has stopped to move: not while the page is
        drawn anew.
        """
        inside.wait_for()
        until = time.monotonic() + PATIENCE_MS / 1000
        before = None
        while time.monotonic() < until:
            self.settle()
            now = inside.bounding_box()  # None for a moment where the page is drawn anew
            if now is not None and now == before:
                return now
            before = now
            self.page.wait_for_timeout(200)
        raise AssertionError(f"it never came to rest: {inside}, last seen at {before}")

    def shows(self, words: str) -> None:
        """Wait for words on the page."""
        self.page.get_by_text(words).first.wait_for()

    def shot(self, name: str, full: bool = True) -> None:
        """Keep a screenshot where the environment asks for them."""
        folder = os.environ.get("ZLAB_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=full)
