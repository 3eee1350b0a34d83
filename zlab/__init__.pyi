from zlab.engine.llm import LLM as LLM
from zlab.engine.sampling_params import SamplingParams as SamplingParams
from zlab.policies.core.policy import Budget as Budget
from zlab.policies.core.policy import Order as Order
from zlab.policies.core.policy import Policy as Policy
from zlab.policies.core.policy import Preemption as Preemption
from zlab.policies.core.scheduler import Scheduler as Scheduler
from zlab.policies.spec import load_policy as load_policy
from zlab.sim.replay import Scenario as Scenario
from zlab.sim.replay import replay as replay
from zlab.traces.formats.reader import read_trace as read_trace
from zlab.traces.recording import Recording as Recording

__all__: list[str]
__version__: str
