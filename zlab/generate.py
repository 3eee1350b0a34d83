"""`zlab generate`: a real model answers a prompt."""

import sys
from typing import Annotated, Any

import typer

from zlab.engine_options import DEFAULT_MODEL, Device, Dtype, EngineModel, Seed, engine_room, engine_settings
from zlab.options import KvBlocks, PolicyName
from zlab.outcome import WENT_WRONG, MisuseError, fail

LAPTOP_BLOCK_SIZE = 64


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")],
    model: EngineModel = DEFAULT_MODEL,
    policy: PolicyName = "hybrid",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of the answer.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", help="How freely tokens are drawn; 0 takes the most probable.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the most probable tokens of this share.")] = 1.0,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; repeat it for several.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", show_default="if it has one", help="Through the model's chat template."),
    ] = None,
    kv_blocks: KvBlocks = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")] = LAPTOP_BLOCK_SIZE,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer a prompt, text as it comes.

    Exit code 0: answered; 1: the answer failed on its way; 2: misuse, or a prompt that can't be served.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    settings = engine_settings(
        model, policy, kv_blocks=kv_blocks, block_size=block_size, device=device, dtype=dtype, seed=seed
    )
    with engine_room():
        failed = _answer(
            text,
            chat,
            settings,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
        )
    if failed:
        raise fail(failed, WENT_WRONG)


def _answer(prompt: str, chat: bool | None, settings: dict[str, Any], **asked: Any) -> str:
    """Write the answer to stdout as it comes; returns why it failed, or nothing."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    params = SamplingParams(**asked)
    llm = LLM(**settings)
    if llm.engine.loaded.tokenizer is None:
        raise MisuseError(f"model {settings['model']!r} has no tokenizer, so it has no text to answer with")
    template = llm.tokenizer.has_chat_template if chat is None else chat
    prompts = llm.chat_prompts([{"role": "user", "content": prompt}]) if template else [prompt]
    failed = ""
    for delta in llm.stream(prompts, params):
        typer.echo(delta.text, nl=False)
        sys.stdout.flush()
        if delta.finish_reason == "error":
            failed = delta.message
    typer.echo()
    return failed
