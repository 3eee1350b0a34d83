"""A change that registry and server must both hold: written down, put to the server, then confirmed or taken back."""

import time

import typer

from policies.evidence import Target
from policies.registry import Change, Registry, RegistryError, Stage
from policies.stored import StoredPolicy
from zlab.live import LiveError, LiveServer, RefusedError, SilentError

ASK_AGAIN_S = (0.2, 1.0, 3.0)


def carry_out(registry: Registry, server: LiveServer, change: Change, policy: StoredPolicy) -> Change:
    """Put a pending change to the server. Returns it done.

    Where the server refuses it is taken back with the reason, and LiveError raised. Where nobody can tell what the
    server did, it is asked what it runs; if it does not say, the change stays pending: LiveError says how to go on.
    """
    try:
        server.carry_out(change, policy)
    except RefusedError as error:
        registry.undo(change.number, str(error))
        raise RefusedError(f"{error}; nothing was changed (change {change.number} is undone)") from error
    except SilentError as error:
        if not _runs_it(server, change):
            raise SilentError(
                f"{error}. Nobody knows whether the server took change {change.number}: it stays pending, and the next "
                f"`zlab promote` or `zlab rollback` with --live {server.url} asks the server"
            ) from error
    return registry.confirm(change.number)


def settle(registry: Registry, server: LiveServer, target: Target, who: str) -> None:
    """Finish what a process that is gone left pending at this server, by what it runs. Raises LiveError."""
    waiting = registry.pending(target)
    if waiting is None or not waiting.is_abandoned:
        return
    if waiting.url != server.url:
        raise RegistryError(
            f"{waiting.describe()} was put to {waiting.url} and never finished: name that server by --live, or "
            "use --force --why without it"
        )
    settled = registry.settle(target, server.running(waiting.lane), who)
    if settled is not None:
        typer.echo(f"{settled.describe()} was left unfinished and is {settled.state} now: {settled.reason}", err=True)


def compare(registry: Registry, server: LiveServer, target: Target) -> None:
    """Say it where the server runs another policy than the registry has as live. Raises LiveError."""
    running, standing = server.running(Stage.LIVE), registry.live(target)
    if standing is not None and running != standing.policy.digest:
        typer.echo(
            f"warning: {server.url} runs policy {str(running)[:12]}, the registry has {standing.policy.name} "
            f"({standing.policy.digest[:12]}) as live for {target}",
            err=True,
        )


def repeat(registry: Registry, server: LiveServer, target: Target, stage: Stage, policy: StoredPolicy) -> Change | None:
    """Tell a server again what the registry has already, where it runs something else. None: there is no need.

    For a server that was started with another policy. Raises LiveError where it does not take it.
    """
    standing = registry.live(target) if stage is Stage.LIVE else registry.canary(target)
    if standing is None or standing.policy.digest != policy.digest or server.running(stage) == policy.digest:
        return None
    server.carry_out(standing.change, policy)
    return standing.change


def warn_of_plain_text(server: LiveServer) -> None:
    """Say it where the key is sent over a network unencrypted."""
    if server.shows_key:
        typer.echo(f"warning: the admin key goes to {server.url} unencrypted: prefer https", err=True)


def _runs_it(server: LiveServer, change: Change) -> bool:
    """Whether the server says that it runs what it was asked to, asked a few times."""
    wanted = None if change.to_stage is Stage.RETIRED else change.digest
    for pause_s in ASK_AGAIN_S:
        try:
            if server.running(change.lane) == wanted:
                return True
        except LiveError:
            pass
        time.sleep(pause_s)
    return False
