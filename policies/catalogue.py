"""Every choice that ships, by question and name."""

from typing import Any

from policies.admission import WhenItFits
from policies.batching import Mixed, PrefillFirst
from policies.budget import Adaptive, Fixed, Unlimited
from policies.compression import ByScore
from policies.ordering import FairShare, FirstCome, PriorityWithAgeing, ShortestOutput, ShortestPrompt
from policies.predict import ClassMean, NoisyOracle, Oracle
from policies.preemption import LatestBehind, LatestFirst, Never, SlotlessFirst
from policies.prefix import FullBlocks, NoSharing
from policies.slots import Constrained, Hybrid, NoSlots

QUESTIONS: dict[str, dict[str, type[Any]]] = {
    "order": {
        "first-come": FirstCome,
        "priority": PriorityWithAgeing,
        "shortest-prompt": ShortestPrompt,
        "shortest-output": ShortestOutput,
        "fair-share": FairShare,
    },
    "admission": {"when-it-fits": WhenItFits},
    "batching": {"mixed": Mixed, "prefill-first": PrefillFirst},
    "slots": {"none": NoSlots, "constrained": Constrained, "hybrid": Hybrid},
    "budget": {"unlimited": Unlimited, "fixed": Fixed, "adaptive": Adaptive},
    "preemption": {
        "never": Never,
        "latest-first": LatestFirst,
        "slotless-first": SlotlessFirst,
        "latest-behind": LatestBehind,
    },
    "prefix": {"none": NoSharing, "full-blocks": FullBlocks},
    "compression": {"by-score": ByScore},
}
NESTED: dict[str, dict[str, type[Any]]] = {
    "predictor": {"oracle": Oracle, "noisy-oracle": NoisyOracle, "class-mean": ClassMean},
}
