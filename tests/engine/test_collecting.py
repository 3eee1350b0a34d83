"""The garbage collector while an engine serves."""

import gc

import pytest

from engine.collecting import set_aside


def test_what_was_there_before_is_set_aside_and_comes_back() -> None:
    before = gc.get_freeze_count()
    with set_aside():
        assert gc.get_freeze_count() > before + 1000
        assert len(gc.get_objects()) < 1000, "what a full pass looks at"
    assert gc.get_freeze_count() == 0


def test_it_comes_back_after_an_error_too() -> None:
    with pytest.raises(KeyError), set_aside():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_garbage_that_is_made_meanwhile_is_collected() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    with set_aside():
        Ring()
        assert gc.collect() > 0
