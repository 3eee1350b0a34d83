"""Scorers of the user's own, as policies read them: nothing of the file is run."""

import pickle
from pathlib import Path

import pytest

from zlab.policies.scorers import OwnScorer, ScorerTraits, scorer_traits
from zlab.policies.snapshot import store_policy, stored_from_dict
from zlab.policies.spec import PolicyError, load_policy, policy_digest, policy_from_toml

LONGEST = """import no_such_library_is_ever_imported
from zlab.engine.scorers.interface import Scorer


class Longest(Scorer):
    needs_queries = False
    recent = 8

    def rate(self, tokens):
        return tokens.keys.norm(dim=-1)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "longest.py"
    path.write_text(LONGEST)
    return path


SPEC = "hybrid:tokens=64,window=4,scorer=longest.py:Longest"


@pytest.mark.usefixtures("file")
def test_a_policy_knows_what_the_scorer_needs() -> None:
    compression = load_policy(SPEC).compression
    assert compression.scorer == "longest.py:Longest"
    assert scorer_traits(compression.scorer) == ScorerTraits(needs_queries=False, recent=8)
    assert not compression.needs_queries


def test_the_source_text_is_part_of_digest_and_snapshot(file: Path) -> None:
    policy = load_policy(SPEC)
    stored = store_policy(policy)
    assert stored.sources == {"longest.py:Longest": LONGEST}
    assert policy_digest(policy_from_toml(stored.toml)) == stored.digest
    file.write_text(LONGEST.replace("recent = 8", "recent = 9"))
    other = load_policy(SPEC)
    assert other != policy
    assert policy_digest(other) != stored.digest
    file.unlink()
    back = stored_from_dict(stored.as_dict()).load()
    assert back == policy
    assert store_policy(back) == stored
    assert isinstance(back.compression.scorer, OwnScorer)
    assert back.compression.scorer.source == LONGEST
    with pytest.raises(PolicyError, match=r"source text of 'longest\.py:Longest' is missing"):
        stored_from_dict({**stored.as_dict(), "sources": {}})


@pytest.mark.usefixtures("file")
def test_it_travels_to_other_processes() -> None:
    policy = load_policy(SPEC)
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again.compression.scorer.source == LONGEST


WRONG = {
    "class Other: pass": "unknown class 'Longest'; did you mean|unknown class 'Longest' .*Other",
    "class Longest: pass": "is derived from Scorer of zlab.engine.scorers.interface",
    "class Longest(Scorer): pass": "needs the method rate",
    "class Longest(Scorer):\n def rate(self): pass": r"rate\(self\) cannot be called as",
    "class Longest(Scorer):\n def rate(self, tokens, more): pass": "cannot be called as",
    "class Longest(Scorer):\n async def rate(self, tokens): pass": "must be a plain method",
    "class Longest(Scorer):\n rate = 3": "must be a plain method",
    "class Longest(Scorer):\n def rating(self, tokens): pass": "'rating'; did you mean 'rate'",
    "class Longest(Scorer):\n need_queries = False\n def rate(self, t): pass": "'needs_queries'",
    "class Longest(Scorer):\n needs_queries = 0\n def rate(self, t): pass": "True or False, not 0",
    "class Longest(Scorer):\n recent = -1\n def rate(self, t): pass": "at least 0, not -1",
    "class Longest(Scorer):\n recent = f()\n def rate(self, t): pass": "written as a constant",
    "class Longest(Scorer):\n keeps_positions = True\n def rate(self, t): pass": "keeps_history",
    "class Longest(Scorer)": "line 1 is not Python",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_scorer_is_refused_when_it_is_read(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(PolicyError, match=WRONG[text]):
        load_policy(SPEC)


def test_a_file_that_is_missing() -> None:
    with pytest.raises(PolicyError, match=r"no such file: nowhere\.py"):
        load_policy("hybrid:scorer=nowhere.py:A")


def test_an_own_compression_names_a_scorer_that_ships(file: Path) -> None:
    own = "from zlab.policies.core.policy import Compression\nclass Mine(Compression):\n"
    own += " @property\n def scorer(self): return 'longest.py:Longest'\n"
    (file.parent / "mine.py").write_text(own)
    with pytest.raises(PolicyError, match="scorer must be one that ships"):
        load_policy("hybrid:compression=mine.py:Mine")
