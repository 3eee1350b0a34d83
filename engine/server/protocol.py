"""The bodies of requests: their fields, types and bounds. A field that is none of these is kept, for a warning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.sampling_params import MOST_COPIES, MOST_LOGPROBS, SEED_BITS

MOST_TOKENS = 2**31 - 1
MOST_STOPS = 64
ID_PATTERN = r"^[A-Za-z0-9._:\-]{1,128}$"

TokenIds = list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]]
Text = Annotated[str, Field(min_length=1)]
RequestId = Annotated[str, Field(pattern=ID_PATTERN)]


class StreamOptions(BaseModel):
    """What a stream carries besides its deltas."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class SamplingRequest(BaseModel):
    """What both kinds of completion share. null stands for the default everywhere."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="The served model; left out, it is the one there is.")
    n: int | None = Field(None, ge=1, le=MOST_COPIES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**SEED_BITS)
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    user: str | None = Field(None, description="Whose request this is: policies that share fairly go by it.")
    # beyond the OpenAI API, by vLLM's names
    top_k: int | None = Field(None, ge=-1, le=MOST_TOKENS)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=2.0)
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Larger is more urgent.")
    request_id: RequestId | None = Field(None, description="The request's id, as the header X-Request-Id.")
    return_token_ids: bool | None = Field(None, description="Give output tokens by number, too.")


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(
        description="A text, a list of texts, the token ids of one prompt, or a list of those."
    )
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="16 if left out.")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class ContentPart(BaseModel):
    """A piece of a message; this server knows texts."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation; what else it carries is handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """What a chat template is given: parts of a text joined."""
        content = self.content
        joined = "".join(part.text for part in content) if isinstance(content, list) else content
        return {**(self.model_extra or {}), "role": self.role, "content": joined}


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="As many as fit if left out.")
    max_completion_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, bool | int | str] | None = Field(
        None, description="Values for the chat template, as enable_thinking (by vLLM's name)."
    )


class PolicyChangeRequest(BaseModel):
    """What an administrator sends.

    `policy` is TOML with every setting written out, `digest` what it and its `sources` (text of each own class's file)
    must amount to. Without a policy, a canary ends: its lane follows the live one. `change` is the sender's number.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    lane: Literal["live", "canary"]
    policy: str | None = None
    sources: dict[str, str] = Field(default_factory=dict)
    name: str = "policy"
    digest: str | None = None
    who: str = Field(min_length=1, max_length=200)
    why: str = Field(default="", max_length=2000)
    evidence: str | None = None
    change: int | None = None


class PolicyUndoRequest(BaseModel):
    """A change to be taken back: the last one, after which the policy of that digest decides in that lane."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lane: Literal["live", "canary"]
    digest: str
