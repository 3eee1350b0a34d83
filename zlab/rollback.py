"""`zlab rollback`: the policy before the live one is live again, or the canary ends."""

from typing import Annotated

import typer

from policies.registry import Stage
from zlab.agreement import carry_out, compare, settle, warn_of_plain_text
from zlab.option_groups import with_groups
from zlab.options import GpuName, ModelName
from zlab.promote import To, show_change
from zlab.registry_options import DEFAULT_REGISTRY, ChangeOptions, RegistryPath, registry_at, signed_by, target_of


@with_groups
def rollback(
    *,
    what: Annotated[To, typer.Option("--of", help="Go back from what is live, or end the canary.")] = To.live,
    gpu: GpuName = "h200",
    model: ModelName = "qwen3-8b",
    registry: RegistryPath = DEFAULT_REGISTRY,
    force: Annotated[
        bool, typer.Option("--force", help="Take an unfinished change as not done; needs --why, and is written down.")
    ] = False,
    by: ChangeOptions,
) -> None:
    """Take the live policy back to the one before it, or end the canary, in one transaction.

    With --live at the server that runs there, too. Exit code 0: done; 1: there is nothing to go back to, or the server
    did not; 2: misuse.
    """
    by.check_reason(force)
    target, signed, stage = target_of(model, gpu), signed_by(by.who), Stage(what.value)
    server = by.server()
    kept = registry_at(registry)
    if server is None:
        standing = kept.rollback(target, signed, by.why, stage, force=force, seen=kept.newest(target))
        show_change(standing.change, kept, by.as_json)
        return
    warn_of_plain_text(server)
    settle(kept, server, target, signed)
    compare(kept, server, target)
    seen = kept.newest(target)
    change = kept.begin_rollback(target, signed, by.why, server.url, stage, force=force, seen=seen)
    show_change(carry_out(kept, server, change, kept.policy(change.digest)), kept, by.as_json)
