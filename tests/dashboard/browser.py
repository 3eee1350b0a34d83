"""A real browser before a real server: Debian's Chromium, driven by Playwright, and the dashboard as a process."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, Request, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
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
PATIENCE_MS = 60_000


@contextmanager
def serving(*roots: Path) -> Iterator[str]:
    """The dashboard on these folders; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "streamlit", "run", "dashboard", "--server.headless", "true",
        "--server.address", "127.0.0.1", "--server.port", str(port), "--", *map(str, roots),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        (roots[0] / "server.log").open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}/_stcore/health", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(20)


def _wait(url: str, server: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        try:
            with urlopen(url, timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("the dashboard did not start")


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
        if request.failure != "net::ERR_ABORTED":  # that is a reader who has gone on to another page
            self.complaints.append(f"failed: {request.url}: {request.failure}")

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(text)

    def open(self, query: str = "") -> None:
        """Go to an address and wait until the page is drawn."""
        self.page.goto(f"{self.address}/{query}")
        self.page.get_by_text("Zipage Lab", exact=True).first.wait_for()
        self.settle()

    def settle(self) -> None:
        """Wait until the server has nothing more to say and every figure is drawn."""
        self.page.wait_for_timeout(300)
        self.page.wait_for_function(
            "() => document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
            " && [...document.querySelectorAll('.js-plotly-plot')].every(plot => plot.querySelector('.main-svg'))"
        )
        self.page.wait_for_timeout(300)

    def view(self, name: str) -> None:
        """Choose a view by its button."""
        self.choose(name)

    def choose(self, name: str) -> None:
        """Choose a segment of a control by its words."""
        segment = self.page.get_by_role("radio", name=name, exact=True)
        segment.or_(self.page.get_by_role("button", name=name, exact=True)).first.click()
        self.settle()

    def shows(self, words: str) -> None:
        """Wait for words on the page."""
        self.page.get_by_text(words).first.wait_for()

    def shot(self, name: str, full: bool = True) -> None:
        """Keep a screenshot where the environment asks for them."""
        folder = os.environ.get("ZLAB_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=full)
