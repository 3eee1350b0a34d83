"""Options that belong together, stated once: a dataclass as one parameter of a command stands for all its fields."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeGuard, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer should see it: in the place of a parameter that is a dataclass stand its fields.

    A field is annotated as a parameter would be, `Annotated[int, typer.Option(...)]`, and has a default; it may itself
    be a dataclass of options. No two may have the same name. The command is called with the dataclasses made.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {name: one.annotation for name, one in signature.parameters.items() if _is_group(one.annotation)}
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        flat += _options(groups[name]) if name in groups else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def called(**given: Any) -> None:
        made = {name: _made(group, given) for name, group in groups.items()}
        own = {name: given[name] for name in signature.parameters if name not in groups}
        command(**made, **own)

    called.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in flat} | {"return": None}
    return called


def _is_group(annotation: Any) -> TypeGuard[type[Any]]:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _options(group: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for item in fields(group):
        if _is_group(hint := hints[item.name]):
            yield from _options(hint)
        else:
            assert item.default is not MISSING, f"{group.__name__}.{item.name} has no default"
            yield inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hint)


def _made(group: type[Any], given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(group)
    return group(**{name: _made(hint, given) if _is_group(hint) else given[name] for name, hint in hints.items()})
