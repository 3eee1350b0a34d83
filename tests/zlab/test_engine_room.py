"""How what a command cannot import is told: with the extra that brings it."""

import pytest

from engine.errors import EngineError
from zlab.engine_options import engine_room
from zlab.outcome import MisuseError


@pytest.mark.parametrize(
    ("missing", "extra"),
    [
        ("torch", "engine"),
        ("transformers.utils", "engine"),
        ("fastapi", "server"),
        ("prometheus_client.core", "server"),
        ("ray", "replicas"),
        ("ray.serve", "replicas"),
        (None, "engine"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(missing: str | None, extra: str) -> None:
    with pytest.raises(MisuseError, match=rf"No module named .*: pip install 'zipage-lab\[{extra}\]'$"), engine_room():
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)


def test_what_the_engine_refuses_is_misuse() -> None:
    with pytest.raises(MisuseError, match=r"^too many blocks$"), engine_room():
        raise EngineError("too many blocks")
