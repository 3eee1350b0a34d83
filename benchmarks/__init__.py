"""Measurements of the simulator, the engine, the server and the dashboard.

Each module runs by `python -m benchmarks.NAME --help`. Modules that were merged keep their old
names: `python -m benchmarks.stream_cost ...` runs `python -m benchmarks.server streams ...`.
"""

import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIASES: dict[str, tuple[str, ...]] = {  # old name -> module and first arguments
    "dashboard_speed": ("dashboard",),
    "engine_gpu": ("engine",),
    "judge_simulator": ("judge",),
    "metrics_cost": ("server", "metrics"),
    "server_gpu": ("server", "load"),
    "sim_speed": ("simulator",),
    "stream_cost": ("server", "streams"),
    "tune_products": ("tune",),
    "validate_simulator": ("validate",),
}


class _AliasFinder(MetaPathFinder, InspectLoader):
    """Finds the old names of merged modules; such a module only runs the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        known = package == __name__ and name in ALIASES
        return ModuleSpec(fullname, self) if known else None

    def get_source(self, fullname: str) -> str:
        module, *arguments = ALIASES[fullname.rpartition(".")[2]]
        return (
            f"import sys\nfrom benchmarks.{module} import main\nif __name__ == '__main__':\n"
            f"    sys.argv[:1] = {[f'benchmarks.{module}', *arguments]!r}\n    main()\n"
        )


if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
    sys.meta_path.append(_AliasFinder())
