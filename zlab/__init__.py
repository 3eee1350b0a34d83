"""Zipage Lab: one scheduler, simulated and run, with compressed PagedAttention behind it.

The names of `__all__` are the public face. Each is imported when it is first used, so that
`import zlab` loads neither torch nor simpy.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

_HOME = {
    "Budget": "zlab.policies.core.policy",
    "LLM": "zlab.engine.llm",
    "Order": "zlab.policies.core.policy",
    "Policy": "zlab.policies.core.policy",
    "Preemption": "zlab.policies.core.policy",
    "Recording": "zlab.traces.recording",
    "SamplingParams": "zlab.engine.sampling_params",
    "Scenario": "zlab.sim.replay",
    "Scheduler": "zlab.policies.core.scheduler",
    "load_policy": "zlab.policies.spec",
    "read_trace": "zlab.traces.formats.reader",
    "replay": "zlab.sim.replay",
}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name == "__version__":  # looked up late: a checkout that is not installed has none
        return version("zipage-lab")
    if name not in _HOME:
        hint = import_module("zlab.traces.choices").did_you_mean(name, _HOME)
        raise AttributeError(f"module 'zlab' has no attribute {name!r}{hint}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
