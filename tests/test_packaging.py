"""The wheel and the sdist hold the package `zlab` with its data, and nothing beside it.

The files are built from a copy of the sources, because setuptools writes into the folder that it
builds. The wheel is unpacked and run away from the checkout, so nothing here needs a network.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.house_rules import ROOMS
from tests.house_source import ROOT

pytest.importorskip("setuptools", reason="setuptools, which builds the wheel, is not installed")

BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", *ROOMS)
SMALL = "synth:amc23?num_problems=2&samples=2&cap=300"


def build(source: Path, kind: str) -> Path:
    """Build a `wheel` or an `sdist` of the sources in `source`; returns the file."""
    out = source.parent / f"{source.name}-{kind}"
    out.mkdir()
    code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, the links `zlab/ROOM` included."""
    copy = tmp_path_factory.mktemp("build") / "checkout"
    copy.mkdir()
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build(checkout, "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds what `pip install` would put into site-packages."""
    target = wheel.parent / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(site_packages: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the unpacked wheel, in a folder away from the checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site_packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def packaged(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_file_of_the_rooms_and_nothing_else(wheel: Path, checkout: Path) -> None:
    rooms = [room for room in ROOMS if room != "zlab"]
    expected = {
        f"zlab/{path.relative_to(checkout)}"
        for room in rooms
        for path in (checkout / room).rglob("*")
        if path.is_file()
    }
    expected |= {
        str(path.relative_to(checkout))
        for path in (checkout / "zlab").rglob("*")
        if path.is_file() and path.relative_to(checkout / "zlab").parts[0] not in rooms
    }
    assert packaged(wheel) == expected
    for needed in (
        "zlab/py.typed",
        "zlab/__init__.pyi",
        "zlab/policies/presets/hybrid.toml",
        "zlab/sim/measured/h200-qwen3-8b-bfloat16.json",
        "zlab/engine/tuned/nvidia-h200.json",
        "zlab/dashboard/.streamlit/config.toml",
    ):
        assert needed in expected


def test_sdist_builds_the_same_wheel(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    with tarfile.open(build(checkout, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not (unpacked / "tests").exists()
    assert packaged(build(unpacked, "wheel")) == packaged(wheel)


def test_installed_public_names_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, zlab; from zlab import Order, Scenario, replay; "
        f"assert zlab.__file__.startswith({str(installed)!r}), zlab.__file__; "
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & set({ROOMS!r})))"
    )
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['zlab']"


def test_installed_sweep_runs_in_two_worker_processes(installed: Path, tmp_path: Path) -> None:
    """Points are pickled by module name, so the workers must find the same names."""
    out = tmp_path / "points.csv"
    done = run(
        installed, tmp_path, "-m", "zlab", "sweep", SMALL, "--grid", "policy=full-kv,hybrid",
        "--kv-blocks", "64", "--jobs", "2", "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["full-kv", "hybrid"]
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)


def test_installed_replay_reads_its_presets_and_profiles(installed: Path, tmp_path: Path) -> None:
    done = run(
        installed, tmp_path, "-m", "zlab", "replay", SMALL, "--policy", "hybrid",
        "--cost", "h200-qwen3-8b-bfloat16", "--kv-blocks", "64", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests_finished"] == 4
