"""The script that the documentation tells the whole story with: it runs, and ends as it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port
from zlab.policies.registry import PolicyRegistry, Target
from zlab.policies.spec import load_policy, policy_digest

REPOSITORY = Path(__file__).resolve().parents[1]
CANDIDATE = "constrained:tokens=48,window=8"
LONGEST_S = 900.0  # a fault would hang; a busy machine is slow


def test_record_validate_promote_serve_breach_rollback(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    found = subprocess.run(
        ["bash", str(REPOSITORY / "docs/examples/story.sh"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env=environment,
        cwd=REPOSITORY,
        check=False,
    )
    log = tmp_path / "server.log"
    told = f"{found.stdout}\n{found.stderr}\n{log.read_text('utf-8') if log.exists() else 'no log'}"
    assert found.returncode == 0, told
    assert found.stdout.count("\n8 x length\n") == 2, told  # no request lost, whatever decided
    assert found.stdout.count("\n16 x length\n") == 1, told

    target = Target("smollm2-135m", "l40s")
    registry = PolicyRegistry(tmp_path / "registry.db", create=False)
    live = registry.live(target)
    assert live is not None
    assert live.policy.digest == policy_digest(load_policy(CANDIDATE))
    steps = [
        (one.action, one.name, one.who == "watch", one.forced) for one in registry.history(target)
    ]
    assert steps == [
        ("validate", CANDIDATE, False, False),
        ("promote", "full-kv", False, True),
        ("promote", CANDIDATE, False, False),
        ("promote", "full-kv", False, True),
        ("rollback", CANDIDATE, True, False),
    ]
    last = registry.history(target)[-1]
    assert last.why.startswith("preemptions_per_request <= 0.25 is broken: ")

    (manifest,) = (tmp_path / "watched").glob("*/live/manifest.json")
    changes = json.loads(manifest.read_text("utf-8"))["policy_changes"]
    assert [one["name"] for one in changes] == ["full-kv", CANDIDATE]
