"""What the machine allows: the pool and the bounds of one step."""

from dataclasses import dataclass, fields

from policies.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that hold for a whole run.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: token positions a block.
        max_batched_tokens: tokens a step may compute, decodes included.
        max_running: requests that may hold blocks at once (or share a step, where the batching says so).
        max_model_len: prompt and output tokens of one request together.
        host_blocks: blocks of host memory for swapped requests.
    """

    num_blocks: int
    block_size: int = 16
    max_batched_tokens: int = 8192
    max_running: int = 256
    max_model_len: int = 40960
    host_blocks: int = 0

    @property
    def step_requests(self) -> int:
        """Requests that may decode in one step: each computes a token."""
        return min(self.max_running, self.max_batched_tokens)

    def __post_init__(self) -> None:
        """Raise ConfigError on a size below one."""
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name == "host_blocks" else 1
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{item.name} must be a whole number of at least {least}, not {value!r}")
