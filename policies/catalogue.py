"""Every choice that ships for each option group of a policy, with one description each.

    order           which request is next in the waiting queue?
      first-come    the request that was submitted first ...
        lookahead   requests behind the head that are tried when the head does not fit ...

The command line (`zlab policy list`), the dashboard's form and the reference in the documentation
show these texts. A new choice is a class and an entry here; a test compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zlab.policies.budget import Adaptive, Fixed, Unlimited
from zlab.policies.options import (
    ByScore,
    Constrained,
    FullBlocks,
    Hybrid,
    Mixed,
    NoSharing,
    NoSlots,
    PrefillFirst,
    RunningOrder,
    WhenItFits,
)
from zlab.policies.ordering import (
    ClassMean,
    FairShare,
    FirstCome,
    NoisyOracle,
    Oracle,
    PriorityWithAgeing,
    ShortestOutput,
    ShortestPrompt,
    StrictPriority,
)
from zlab.policies.preemption import (
    CostAware,
    LatestBehind,
    LatestFirst,
    LeastUrgent,
    Never,
    SlotlessFirst,
)
from zlab.policies.scorers import SCORERS


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a choice.

    Attributes:
        text: What the setting does, with its unit.
        choices: The values of a setting of words whose type does not name them.
    """

    text: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to answer the question of an option group.

    Attributes:
        cls: The class; its fields are the settings.
        text: What the choice does, in one sentence.
        settings: The description of every field of `cls`.
    """

    cls: type[Any]
    text: str
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """An option group of a policy: the question that it answers, and the choices by name."""

    question: str
    choices: Mapping[str, Choice]


_QUEUE = {
    "lookahead": Setting(
        "Requests behind the head of the queue that are tried when the head does not fit; with 0 "
        "the head blocks the queue."
    ),
    "max_skips": Setting("How often a head may be passed over before it blocks the queue."),
}
_FIRST = {
    "first": Setting("The priority value that is most urgent.", ("highest", "lowest")),
}
_CHUNKED = {
    "max_chunk": Setting(
        "Most prompt tokens of one request in a step; 0 leaves only the step's token budget."
    ),
    "asynchronous": Setting(
        "Whether a step is planned before the output of the one before it has returned, with two "
        "batches in flight; for simulation only."
    ),
}
_REUSE = {
    "reuse": Setting(
        "Which free block is reused first: the one released first, or one without matchable "
        "content (the latest of them) before all others.",
        ("released", "unmatchable"),
    )
}
_NUM_SLOTS = {"num_slots": Setting("Query slots; 0 means as many as budgets fit in the pool.")}
_SIZE = {
    "tokens": Setting("Tokens that a compression keeps, rounded up to whole blocks."),
    "blocks": Setting(
        "Blocks that a request may hold (N_max), the empty one included; 0 means by tokens."
    ),
}
_RECOVERY = {
    "comes_back": Setting(
        "How a preempted request resumes: recompute its keys and values, or swap its blocks to "
        "host memory and back (needs host blocks)."
    )
}

CATALOGUE: Mapping[str, OptionGroup] = {
    "order": OptionGroup(
        "which request is next in the waiting queue?",
        {
            "first-come": Choice(
                FirstCome,
                "The request that was submitted first; a preempted request keeps its place.",
                _QUEUE,
            ),
            "priority": Choice(
                PriorityWithAgeing,
                "The request with the highest priority; later arrivals lift those that wait.",
                {
                    **_QUEUE,
                    "arrivals_per_level": Setting(
                        "Later arrivals that make up for one level of priority."
                    ),
                },
            ),
            "strict-priority": Choice(
                StrictPriority,
                "The request with the most urgent priority, however long others wait.",
                {**_QUEUE, **_FIRST},
            ),
            "shortest-prompt": Choice(
                ShortestPrompt, "The request with the fewest prompt tokens.", _QUEUE
            ),
            "shortest-output": Choice(
                ShortestOutput,
                "The request with the fewest output tokens still expected when it joins the queue.",
                {**_QUEUE, "predictor": Setting("Where the expected output length comes from.")},
            ),
            "fair-share": Choice(
                FairShare,
                "The session that was served the fewest tokens; within a session, first come.",
            ),
        },
    ),
    "admission": OptionGroup(
        "when does a waiting request get blocks?",
        {
            "when-it-fits": Choice(
                WhenItFits,
                "When its whole sequence so far fits the free blocks.",
                {
                    "watermark_share": Setting(
                        "Share of the pool that must stay free after an admission while other "
                        "requests run; at least one block unless 0."
                    ),
                    "count_hits": Setting(
                        "Whether cached blocks need free blocks too, and cached tokens count "
                        "against the step's token budget."
                    ),
                    "reserve": Setting(
                        "Blocks to ask for: those of the sequence now, those of its first chunk "
                        "(and the later ones when they are planned), or the peak that the request "
                        "may ever hold; with peak no request is preempted.",
                        ("sequence", "peak", "chunk"),
                    ),
                    "allocate": Setting(
                        "Blocks that a request gets at admission: those of its whole sequence, or "
                        "with each prefill chunk those of the chunk.",
                        ("sequence", "chunk"),
                    ),
                    "watermark_rounding": Setting(
                        "Whether the watermark is rounded up or down to a whole block.",
                        ("up", "down"),
                    ),
                    "null_blocks": Setting(
                        "Blocks of the pool that are never given out; vLLM keeps one."
                    ),
                },
            )
        },
    ),
    "batching": OptionGroup(
        "what shares a step?",
        {
            "mixed": Choice(
                Mixed,
                "Decodes first, then prefill chunks up to the step's token budget.",
                _CHUNKED,
            ),
            "running-order": Choice(
                RunningOrder,
                "Decodes and prefill chunks in the order of the running list, then admissions.",
                {
                    **_CHUNKED,
                    "after_own_preemption": Setting(
                        "Whether the walk stops or continues when a request that needs blocks is "
                        "itself the victim.",
                        ("stop", "continue"),
                    ),
                },
            ),
            "prefill-first": Choice(
                PrefillFirst,
                "A step is all prefill or all decode; prefill goes first.",
                {
                    "cut": Setting(
                        "Prompts that may be cut to the token budget: any, or only the first of a "
                        "step.",
                        ("any", "first"),
                    ),
                    "limit": Setting(
                        "What max-running bounds: the running requests, or those of one step.",
                        ("running", "step"),
                    ),
                    **_CHUNKED,
                },
            ),
        },
    ),
    "slots": OptionGroup(
        "which requests hold a query slot?",
        {
            "none": Choice(NoSlots, "No request; the scorer reads no queries, or keeps all KV."),
            "constrained": Choice(
                Constrained,
                "Every running request, so at most as many run as there are slots.",
                _NUM_SLOTS,
            ),
            "hybrid": Choice(
                Hybrid,
                "Requests that have reached their observation window; shorter ones run without.",
                {
                    **_NUM_SLOTS,
                    "handout": Setting(
                        "Which request gets a free slot: the nearest to its window, or the next in "
                        "line of the running list.",
                        ("nearest", "line"),
                    ),
                },
            ),
        },
    ),
    "budget": OptionGroup(
        "how many blocks may a request hold while it decodes (N_max)?",
        {
            "unlimited": Choice(Unlimited, "As many as its tokens need; nothing is compressed."),
            "fixed": Choice(Fixed, "The same number for every request.", _SIZE),
            "adaptive": Choice(
                Adaptive,
                "A budget that grows while the pool has free blocks and shrinks under pressure.",
                {
                    **_SIZE,
                    "most_tokens": Setting("Tokens of the largest budget."),
                    "grow_above": Setting(
                        "Share of the pool that must be free before a request takes one block more."
                    ),
                    "shrink_below": Setting(
                        "Share of free blocks below which a compression keeps the smallest budget."
                    ),
                },
            ),
        },
    ),
    "preemption": OptionGroup(
        "which request is preempted when blocks run out, and how does it resume?",
        {
            "never": Choice(
                Never,
                "No request; it needs an admission that reserves the peak, or constrained slots.",
                _RECOVERY,
            ),
            "latest-first": Choice(LatestFirst, "The request that was admitted last.", _RECOVERY),
            "slotless-first": Choice(
                SlotlessFirst,
                "The latest request without a query slot.",
                {
                    **_RECOVERY,
                    "slotted": Setting("Whether requests with a slot follow when none is left."),
                },
            ),
            "latest-behind": Choice(
                LatestBehind,
                "Zipage's rule: the latest request behind the one that needs a block.",
                {
                    **_RECOVERY,
                    "uncompressed": Setting(
                        "Whether a request with a slot that was never compressed may be preempted."
                    ),
                },
            ),
            "least-urgent": Choice(
                LeastUrgent,
                "The running request with the least urgent priority, the latest of them.",
                {
                    **_RECOVERY,
                    **_FIRST,
                    "withdrawn": Setting(
                        "What happens to full blocks whose computation is withdrawn from the step: "
                        "they are forgotten, or stay findable as in vLLM (for simulation only).",
                        ("forgotten", "findable"),
                    ),
                },
            ),
            "cost-aware": Choice(
                CostAware,
                "The request that frees most blocks for each token that it computes again.",
                _RECOVERY,
            ),
        },
    ),
    "prefix": OptionGroup(
        "what do requests with the same prefix share?",
        {
            "none": Choice(
                NoSharing, "Nothing; a preempted request recomputes all of itself.", _REUSE
            ),
            "full-blocks": Choice(
                FullBlocks,
                "Full blocks whose content, and all content before it, is equal.",
                {
                    "keep": Setting(
                        "Whether a compression copies out of shared blocks and leaves them to the "
                        "cache while there are free blocks."
                    ),
                    "findable": Setting(
                        "From when on a full prompt block can be matched: when the step that "
                        "computes it is over, or when that step is planned."
                    ),
                    "copies": Setting(
                        "Which of several blocks with equal content stay findable: the newest, or "
                        "all, the first registered before the others.",
                        ("newest", "all"),
                    ),
                    **_REUSE,
                },
            ),
        },
    ),
    "compression": OptionGroup(
        "which tokens are kept, and when does the request decode again?",
        {
            "by-score": Choice(
                ByScore,
                "The tokens with the highest scores, and the observation window.",
                {
                    "scorer": Setting("How tokens are scored.", tuple(SCORERS)),
                    "window": Setting(
                        "Last tokens whose queries score the others (w); they are always kept."
                    ),
                    "join": Setting(
                        "When a compression takes effect: boundary (the next step), when_done (the "
                        "first step after the copy), blocking (the same step)."
                    ),
                    "sink": Setting("First tokens that are always kept."),
                    "redundancy_lambda": Setting(
                        "Weight of attention against redundancy: lambda in "
                        "lambda * P - (1 - lambda) * R."
                    ),
                    "temperature": Setting("Temperature of the softmax over redundancy."),
                    "decay": Setting("Factor of the score history at every further compression."),
                    "pool_size": Setting(
                        "Width (odd) of the neighbourhood whose highest score a token takes at a "
                        "first compression."
                    ),
                    "threshold": Setting("Similarity above which two keys count as redundant."),
                    "recent": Setting(
                        "Latest tokens that are always kept, at most half of what is kept; a "
                        "scorer may keep more."
                    ),
                },
            )
        },
    ),
}
PARTS: Mapping[str, OptionGroup] = {  # settings that are themselves a choice
    "predictor": OptionGroup(
        "where does the expected output length come from?",
        {
            "oracle": Choice(Oracle, "The true length, which only a replay knows."),
            "noisy-oracle": Choice(
                NoisyOracle,
                "The true length times exp(N(0, sigma)), drawn once for each request.",
                {
                    "sigma": Setting("Standard deviation of the logarithm."),
                    "seed": Setting("Seed of the draws."),
                },
            ),
            "class-mean": Choice(
                ClassMean,
                "The mean output of finished requests of the same class.",
                {"default": Setting("Tokens expected before a request of the class finishes.")},
            ),
        },
    )
}
