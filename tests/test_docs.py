"""The documentation: it builds without a warning, its commands and programs run, and what it says
of the code is what the code says.

A fenced block of a page is one of these, and is run in the order of its page, in a folder of its
own. A block that cannot be run here has `data-skip="the reason"`, which the page shows.

    sh          commands: `zlab` in this process, `curl` and `python` as processes
    python      a program; with a title it is also saved under that name
    toml        saved under its title
    json        every line is an object
    text        not run: output, a layout, a formula
"""

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import zlab
from docs import generate
from tests.house_source import ROOT
from tests.ports import free_port
from tests.zlab.command_line import errors
from tests.zlab.command_line import zlab as command_line
from zlab.policies.catalogue import CATALOGUE, PARTS
from zlab.traces.schema import TABLES, EventKind
from zlab.traces.workload import REQUEST_FIELDS, WorkloadMeta

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
FENCE = re.compile(
    r"^(?P<indent> *)``` *(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)``` *$",
    flags=re.MULTILINE | re.DOTALL,
)
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
LANGUAGES = {"sh", "python", "toml", "json", "text"}
SAVES_CORES = {"compare", "sweep", "validate"}  # commands that start processes unless told
MOST_SKIPPED = 0.2  # of all blocks that could be run


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    attributes: dict[str, str]
    body: str


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order, with included files in place."""
    found = []
    for match in FENCE.finditer(read(page)):
        indent, info = match["indent"], match["info"].strip()
        lines = [line.removeprefix(indent) for line in match["body"].splitlines()]
        body = generate.fill("\n".join(lines))
        words = info.strip("{}").split()
        language = words[0].removeprefix(".") if words else ""
        found.append(Block(language, dict(ATTRIBUTE.findall(info)), body + "\n"))
    return found


# the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the site strictly, once; return the HTML of each page."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in folder.rglob("*.html")
    }


def test_the_site_has_every_page_and_fetches_nothing(site: dict[str, str]) -> None:
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= set(site)
    fetched = re.compile(
        r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=["']?(?:https?:)?//"""
    )
    for page, text in site.items():
        assert not fetched.search(text), f"{page} fetches {fetched.search(text)}"


def test_links_and_pictures_within_the_site_exist(site: dict[str, str]) -> None:
    """MkDocs warns of pages and anchors that are missing, not of files outside `docs`."""
    broken = []
    for page, text in site.items():
        for target in set(re.findall(r"""\b(?:href|src)=["']?([^"'\s>]+)""", text)):
            path, _, anchor = html.unescape(target).partition("#")
            if re.match(r"[a-z]+:", path) or page == "404.html":
                continue
            name = os.path.normpath(Path(page).parent / path) if path else page
            if name in site:
                if anchor and not re.search(rf"""id=["']?{re.escape(anchor)}["'\s>]""", site[name]):
                    broken.append((page, target))
            elif not (DOCS / name).is_file() and not name.startswith(("assets/", "search")):
                broken.append((page, target))
    assert broken == []


def test_every_file_that_a_page_names_exists() -> None:
    """A name is a path from the root, or from a room, as in the text around it."""
    name = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|sh|json))`")
    places = (ROOT, DOCS, *(ROOT / room for room in ("policies", "engine", "engine/server")))
    places += (ROOT / "zlab",)
    missing = [
        (page, found)
        for page in PAGES
        if page != "LOG.md"  # history names what there was
        for found in name.findall(read(page))
        if not found.startswith("runs/") and not any((at / found).is_file() for at in places)
    ]
    assert missing == []


def test_every_generated_part_is_on_one_page(site: dict[str, str]) -> None:
    used = [name for page in PAGES for name in generate.MARK.findall(read(page))]
    assert sorted(used) == sorted(generate.GENERATED)
    assert not any("<!-- generated" in text for text in site.values())


def test_the_reference_of_policies_is_the_catalogue(site: dict[str, str]) -> None:
    page = site["reference/policy.html"]
    for name, group in {**CATALOGUE, **PARTS}.items():
        for kind, choice in group.choices.items():
            assert f'id="{name}-{kind}"' in page
            section = page.split(f'id="{name}-{kind}"')[1].split("<h3")[0]
            assert shown(choice.text) in section
            for setting in fields(choice.cls):
                assert f"<code>{setting.name}</code>" in section
                assert shown(choice.settings[setting.name].text) in section


def shown(text: str) -> str:
    """Return a text as HTML has it: its first words without marks of Markdown."""
    return html.escape(re.split(r"[`*_&<>|]", text)[0], quote=False)


def test_the_reference_of_commands_has_every_option(site: dict[str, str]) -> None:
    page = site["reference/cli.html"]
    sections = {part.split("<")[0].strip(): part for part in re.split(r'<h2 id="[^"]*">', page)[1:]}
    found = dict(generate.commands())
    assert len(found) > 30
    assert set(sections) == set(found)
    for name, command in found.items():
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                wanted = option if option.startswith("-") else option.upper()
                assert f"<code>{wanted}</code>" in sections[name], (name, option)
    assert str(ROOT) not in page


def test_the_reference_of_recordings_is_the_schema(site: dict[str, str]) -> None:
    page = site["reference/recording.html"]
    for name, columns in TABLES.items():
        section = re.split("<h[23]", page.split(f'id="table-{name}"')[1])[0]
        assert re.findall(r"<td><code>(\w+)</code></td>", section) == list(columns)
    assert all(f'id="{kind}"' in page for kind in ("verdicts", "causes", "block-states"))
    section = page.split('id="events"')[1].split("<h2")[0]
    assert re.findall(r"<td>\d+</td>\s*<td><code>(\w+)</code></td>", section) == [
        kind.label for kind in EventKind
    ]


def rows(page: str) -> list[list[str]]:
    """Return the cells of all table rows of a page, without heads."""
    lines = [line for line in read(page).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_field_of_a_trace_is_described() -> None:
    described = [row[0].strip("`") for row in rows("reference/llm-trace.md") if row[0] != "field"]
    assert described == [*REQUEST_FIELDS, "schema", *(f.name for f in fields(WorkloadMeta))]


def test_every_key_of_a_manifest_and_every_figure_is_described(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = command_line("replay", "synth:fixed?num_requests=2&output=4", "--out", str(out))
    assert done.exit_code == 0, errors(done)
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    text = read("reference/recording.md").split("## manifest.json")[1]
    assert set(manifest) <= set(re.findall(r"`(\w+)`", text))
    described = set(re.findall(r"`(\w+)`", read("METRICS.md")))
    endings = tuple(name for name in described if name.startswith("_"))
    stems = {re.sub(r"_[a-z0-9]+$", "", name) for name in described}
    assert len(endings) >= 4
    for key in manifest["summary"]:
        by_ending = key.endswith(endings) and key.rpartition("_")[0] in stems
        assert key in described or by_ending, f"METRICS.md does not describe {key}"


def test_every_public_name_is_in_the_python_reference() -> None:
    documented = set(re.findall(r"^::: (\S+)$", read("reference/python.md"), flags=re.MULTILINE))
    home = vars(zlab)["_HOME"]
    assert {f"{home[name]}.{name}" for name in zlab.__all__} <= documented


def test_a_term_of_the_glossary_is_there_once() -> None:
    found = [row for row in rows("glossary.md") if row[0] != "term"]
    terms = [row[0].lower() for row in found]
    assert len(terms) > 60
    assert [term for term in terms if terms.count(term) > 1] == []
    assert all(len(row) == 4 and all(row) for row in found)


# what the pages show runs


def test_every_block_says_what_it_is_and_few_are_skipped() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page)]
    assert [(page, b.language) for page, b in found if b.language not in LANGUAGES] == []
    programs = [block for _, block in found if block.language in ("sh", "python")]
    skipped = [block for block in programs if "data-skip" in block.attributes]
    assert all(len(block.attributes["data-skip"]) > 10 for block in skipped)
    assert len(skipped) <= MOST_SKIPPED * len(programs), f"{len(skipped)} of {len(programs)}"


class Session:
    """Runs the blocks of one page, one after the other, in the current folder."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.names: dict[str, object] = {"__name__": page}
        self.server: subprocess.Popen[bytes] | None = None
        self.url = ""

    def run(self, block: Block) -> None:
        """Run one block."""
        if "title" in block.attributes:
            Path(block.attributes["title"]).write_text(block.body, encoding="utf-8")
        if block.language == "python":
            exec(compile(block.body, self.page, "exec"), self.names)
        elif block.language == "json":
            for line in block.body.splitlines():
                assert isinstance(json.loads(line), dict)
        elif block.language == "sh":
            for line in re.sub(r"\\\n\s*", "", block.body).splitlines():
                self.command(line, int(block.attributes.get("data-exit", "0")))

    def command(self, line: str, expected: int) -> None:
        """Run one command; anything that a shell would take apart must be quoted."""
        marks = shlex.shlex(line, posix=True, punctuation_chars=True)
        marks.whitespace_split = True
        words = list(marks)
        assert not {"&", ";", "|", ">", "<"} & set(words), f"{self.page}: quote in {line!r}"
        words = shlex.split(line, comments=True)
        if not words:
            return
        if words[:2] == ["zlab", "serve"]:
            self.serve(words[2:])
        elif words[0] == "zlab":
            more = ["--jobs", "1"] if words[1] in SAVES_CORES else []
            done = command_line(*words[1:], *more)
            assert done.exit_code == expected, f"{self.page}: {line}\n{errors(done)}"
            assert done.stdout or done.stderr
        elif words[0] == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
            assert set(words[1:]) <= set(targets), line
        else:
            assert words[0] in ("curl", "python"), f"{self.page}: mark {line!r} with data-skip"
            words = [word.replace("http://127.0.0.1:8000", self.url) for word in words]
            words[:1] = ["curl", "--fail"] if words[0] == "curl" else [sys.executable]
            done2 = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done2.returncode == expected, f"{self.page}: {line}\n{done2.stderr}"

    def serve(self, words: list[str]) -> None:
        """Start the server of a page in the background; a tiny model takes the place of its own,
        which would cost ten seconds more (tests/test_readme.py serves that one).
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        model = words[words.index("--model") + 1]
        small = ["--served-model", model, "--kv-blocks", "96", "--block-size", "16"]
        words = [word if word != model else "tiny-reasoner" for word in words]
        log = Path("server.log")
        with log.open("wb") as written:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "zlab", "serve", *words, *small, "--port", str(port)],
                stdout=written,
                stderr=written,
            )
        for _ in range(3000):
            assert self.server.poll() is None, log.read_text("utf-8")
            try:
                with urllib.request.urlopen(f"{self.url}/health"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError(log.read_text("utf-8"))

    def close(self) -> None:
        """Stop the server; it must end well."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(300) == 0, Path("server.log").read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run a page in; it has the examples of the documentation."""
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


RUN = [page for page in PAGES if any(b.language in LANGUAGES - {"text"} for b in blocks(page))]


@pytest.mark.parametrize("page", RUN)
def test_what_a_page_shows_runs(page: str, folder: Path) -> None:
    session = Session(page)
    try:
        for block in blocks(page):
            if "data-skip" not in block.attributes:
                session.run(block)
    finally:
        session.close()
