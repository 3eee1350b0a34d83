"""The catalogue describes every choice and every setting, and nothing else."""

from dataclasses import fields

import pytest

from zlab.policies.catalogue import CATALOGUE, PARTS, Choice
from zlab.policies.core.policy import ANSWERS, Policy
from zlab.policies.scorers import SCORERS

CHOICES = {
    f"{name} {kind}": choice
    for name, group in {**CATALOGUE, **PARTS}.items()
    for kind, choice in group.choices.items()
}


def test_every_option_group_of_a_policy_has_an_entry() -> None:
    groups = [item.name for item in fields(Policy) if item.name != "name"]
    assert list(CATALOGUE) == groups
    for name, group in CATALOGUE.items():
        assert group.question.endswith("?")
        assert all(issubclass(choice.cls, ANSWERS[name]) for choice in group.choices.values())


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_every_setting_is_described(choice: Choice) -> None:
    assert set(choice.settings) == {item.name for item in fields(choice.cls)}
    for text in [choice.text, *(setting.text for setting in choice.settings.values())]:
        assert text[0].isupper()
        assert text.endswith(".")


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_named_values_are_accepted_and_others_are_not(choice: Choice) -> None:
    for name, setting in choice.settings.items():
        for value in setting.choices:
            choice.cls(**{name: value})
        if setting.choices:
            with pytest.raises(ValueError, match="nonsense"):
                choice.cls(**{name: "nonsense"})


def test_scorers_are_those_of_the_policies() -> None:
    setting = CATALOGUE["compression"].choices["by-score"].settings["scorer"]
    assert setting.choices == tuple(SCORERS)
