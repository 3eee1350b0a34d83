"""Measure how the code is put together: `python -m benchmarks.structure [--root FOLDER] [--json]`.

It counts, in the rooms of a checkout:

* files and lines of source, tests and benchmarks (`__init__.py` apart);
* modules that exactly one other module of the rooms imports;
* boxes and arrows inside a package: a box is a file or a folder directly in it, an arrow is a pair
  of boxes of which one imports the other;
* files that a replay of two requests enters, and files that a chat request enters up to its first
  token. A file is entered when one of its functions is called; the execution of a module's top
  level, at its import, does not count;
* runs of 12 identical lines or more, in source. Blank lines, comments and imports do not count.

`--root` names another checkout, such as a worktree of an older commit, with the rooms at its top.
The chat request needs the package with SmolLM2's weights; without it the figure is null.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.house_source import Module, edges_between, is_under, read_modules

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("traces", "policies", "sim", "engine", "dashboard", "zlab")
MIN_RUN = 12

# Runs in the measured checkout, in a process of its own. `PREFIX` is "zlab." where the rooms
# install below zlab, and empty in older commits.
TRACER = """
import asyncio, json, os, sys, threading
from importlib import import_module
from pathlib import Path

ROOT, PREFIX, WHAT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
ROOMS = ("traces", "policies", "sim", "engine", "dashboard", "zlab")
files, state, active = {}, threading.local(), False


def room_file(name):
    if name not in files:
        path = Path(os.path.realpath(name))
        inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS
        files[name] = str(path.relative_to(ROOT)) if inside else None
    return files[name]


entered = set()


def on_event(frame, event, argument):
    code = frame.f_code
    if event == "call":
        if code.co_name == "<module>":
            state.importing = getattr(state, "importing", 0) + 1
        elif active and not getattr(state, "importing", 0):
            file = room_file(code.co_filename)
            if file is not None:
                entered.add(file)
    elif event == "return" and code.co_name == "<module>":
        state.importing = getattr(state, "importing", 1) - 1


def module(name):
    return import_module(PREFIX + name)


def replay():
    global active
    name = "zlab.cli.main" if PREFIX else "zlab"
    app = import_module(name).app
    spec = "synth:fixed?num_requests=2&prompt=64&output=32"
    active = True
    app(["replay", spec, "--policy", "hybrid"], standalone_mode=False)
    active = False


async def first_token(app):
    global active
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
    data = json.dumps(body).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"",
        "root_path": "", "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
    }
    sent = [{"type": "http.request", "body": data, "more_body": False}]
    ended = asyncio.Event()

    async def receive():
        if sent:
            return sent.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    seen = []

    async def send(message):
        global active
        text = message.get("body", b"").decode()
        if message.get("status", 200) != 200:
            raise SystemExit(f"the chat request was answered with {message['status']}")
        for line in text.splitlines():
            choices = json.loads(line[6:]).get("choices", []) if line.startswith("data: {") else []
            if any((choice.get("delta") or {}).get("content") for choice in choices):
                active = False
                seen.append(line)

    active = True
    await app(scope, receive, send)
    ended.set()
    if not seen:
        raise SystemExit("the chat request ended without a token")


def chat():
    launch = module("engine.server.launch" if PREFIX else "engine.server.server")
    settings = module("engine.engine" if PREFIX else "engine.build").EngineSettings(
        "smollm2", num_blocks=64, block_size=16, device="cpu"
    )
    context, app = launch.open_server(launch.ServerPlan(settings, "hybrid:budget.tokens=128"))
    try:
        asyncio.run(first_token(app))
    finally:
        context.close(timeout_s=5.0)


threading.setprofile(on_event)
sys.setprofile(on_event)
{"replay": replay, "chat": chat}[WHAT]()
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(sorted(entered)))
"""


def is_init(module: Module) -> bool:
    """Return whether the module is the `__init__.py` of a package."""
    return module.path.endswith("__init__.py")


def sizes(modules: Sequence[Module]) -> dict[str, int]:
    """Return the number of files and of lines, `__init__.py` apart."""
    own = [module for module in modules if not is_init(module)]
    return {"files": len(own), "lines": sum(len(m.source.splitlines()) for m in own)}


def imported_once(modules: Sequence[Module]) -> list[str]:
    """Return the modules that exactly one other module imports; an `__init__.py` does not count."""
    plain = {module.name for module in modules if not is_init(module)}
    importers: dict[str, set[str]] = defaultdict(set)
    for importer, targets in edges_between(modules).items():
        for target in targets:
            importers[target].add(importer)
    return sorted(name for name in plain if len(importers[name]) == 1)


def boxes_and_arrows(modules: Sequence[Module], package: str) -> tuple[int, int]:
    """Return the number of boxes directly in a package, and of arrows between them.

    The package's own `__init__.py` is no box.
    """

    def box(name: str) -> str | None:
        inside = name != package and is_under(name, package)
        return name.removeprefix(package + ".").partition(".")[0] if inside else None

    boxes = {found for module in modules if (found := box(module.name)) is not None}
    arrows = {
        (start, end)
        for importer, targets in edges_between(modules).items()
        for target in targets
        if (start := box(importer)) and (end := box(target)) and start != end
    }
    return len(boxes), len(arrows)


def code_lines(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of the lines that count for identical runs."""
    imports = {
        line
        for found in module.import_nodes
        for line in range(found.lineno, (found.end_lineno or found.lineno) + 1)
    }
    for number, line in enumerate(module.source.splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#") and number not in imports:
            yield number, text


def identical_runs(modules: Sequence[Module], length: int = MIN_RUN) -> list[str]:
    """Return the pairs of places that share `length` or more identical lines in a row.

    A pair is written as `a.py:10 ~ b.py:40 (14 lines)`. Indentation does not count.
    """
    lines = {module.path: list(code_lines(module)) for module in modules}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, rows in lines.items():
        for start in range(len(rows) - length + 1):
            window = tuple(text for _, text in rows[start : start + length])
            places[window].append((path, start))
    found, covered = [], set()
    for same in places.values():
        for index, (path, start) in enumerate(same):
            for other, other_start in same[index + 1 :]:
                if (path, start, other, other_start) in covered:
                    continue
                left, right = lines[path][start:], lines[other][other_start:]
                pairs = zip(left, right, strict=False)
                num = sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))
                covered |= {(path, start + step, other, other_start + step) for step in range(num)}
                found.append(f"{path}:{left[0][0]} ~ {other}:{right[0][0]} ({num} lines)")
    return found


def files_entered(root: Path, what: str) -> list[str] | None:
    """Return the files of the rooms that a `replay` or a `chat` request enters.

    It is None when the run is not possible here, for example without a model.
    """
    prefix = "zlab." if (root / "zlab" / "traces").exists() else ""
    done = subprocess.run(
        [sys.executable, "-c", TRACER, str(root.resolve()), prefix, what],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(f"{what}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def structure(root: Path, with_runs: bool = True) -> dict[str, Any]:
    """Return all figures of a checkout; `with_runs` also runs a replay and a chat request."""
    modules = read_modules(root, ROOMS)
    names = {module.name for module in modules}
    report: dict[str, Any] = {
        "source": sizes(modules),
        "tests": sizes(read_modules(root, ["tests"])),
        "benchmarks": sizes(read_modules(root, ["benchmarks"])),
        "by_room": {
            room: sizes([module for module in modules if module.room == room]) for room in ROOMS
        },
        "imported_once": imported_once(modules),
        "boxes_and_arrows": {
            package: boxes_and_arrows(modules, package)
            for package in ("engine", "engine.server")
            if package in names
        },
        "identical_runs": identical_runs(modules),
    }
    if with_runs:
        report["files_entered"] = {what: files_entered(root, what) for what in ("replay", "chat")}
    return report


def show(report: dict[str, Any], *, lists: bool) -> None:
    """Print the figures, and with `lists` what they are made of."""
    for part in ("source", "tests", "benchmarks"):
        print(f"{part:34} {report[part]['files']:5} files {report[part]['lines']:7,} lines")
    for room, size in report["by_room"].items():
        print(f"  {room:32} {size['files']:5} files {size['lines']:7,} lines")
    once = report["imported_once"]
    by_room = Counter(name.partition(".")[0] for name in once)
    spread = ", ".join(f"{room} {count}" for room, count in sorted(by_room.items()))
    print(f"{'modules with one importer':34} {len(once):5} ({spread})")
    for package, (boxes, arrows) in report["boxes_and_arrows"].items():
        print(f"{'inside ' + package:34} {boxes:5} boxes {arrows:7} arrows")
    for what, files in report.get("files_entered", {}).items():
        number = "unknown" if files is None else len(files)
        print(f"{'files entered by a ' + what:34} {number:>5}")
    print(f"{'identical runs of 12 lines or more':34} {len(report['identical_runs']):5}")
    if lists:
        for name in ("imported_once", "identical_runs"):
            print(f"\n{name}\n  " + "\n  ".join(report[name]))
        for what, files in report.get("files_entered", {}).items():
            print(f"\nfiles entered by a {what}\n  " + "\n  ".join(files or ["unknown"]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--static", action="store_true", help="without the two runs")
    parser.add_argument("--lists", action="store_true", help="also print the modules and files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if not all((given.root / room).is_dir() for room in ROOMS):
        parser.error(f"--root {given.root}: it must hold the rooms {', '.join(ROOMS)}")
    report = structure(given.root, with_runs=not given.static)
    if given.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, lists=given.lists)


if __name__ == "__main__":
    main()
