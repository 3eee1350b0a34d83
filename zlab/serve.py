"""`zlab serve`: an OpenAI-compatible server whose scheduling policy is known, and can be changed while it runs."""

import ipaddress
import logging
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.evidence import Target
from policies.gates import Gates, gates_from_toml
from zlab.engine_options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    EngineModel,
    MemoryShare,
    Seed,
    engine_room,
    engine_settings,
)
from zlab.option_groups import with_groups
from zlab.options import SizeOptions
from zlab.outcome import MisuseError
from zlab.registry_options import target_of

LOOPBACK = "127.0.0.1"
API_KEY, ADMIN_KEY = "ZLAB_API_KEY", "ZLAB_ADMIN_KEY"
DUMMY = "dummy:"
SWITCH_S = 0.0005  # the engine's thread gets the interpreter back this soon from the one that talks to clients


@dataclass(frozen=True)
class DoorOptions:
    """Who may come in from where, and how many."""

    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = LOOPBACK
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one; the log says which.")] = (
        8000
    )
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="The name that clients use; the model's own if not given.")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help=f"API keys, one a line; else ${API_KEY}, else none needed.")
    ] = None
    admin_key_file: Annotated[
        Path | None, typer.Option("--admin-key-file", help=f"The admin key; else ${ADMIN_KEY}, else no admin.")
    ] = None
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen beyond this machine although there is no API key.")
    ] = False
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="Most requests under way.")] = 1024
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Most outputs that wait for room.")] = 1024
    max_outputs: Annotated[
        int, typer.Option("--max-outputs", min=1, help="Most outputs of one request: its prompts times n.")
    ] = 128
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Longest prompt; what the model takes.")
    ] = None
    max_unread_tokens: Annotated[
        int, typer.Option("--max-unread-tokens", min=1, help="How far a stream's reader may fall behind.")
    ] = 2048
    max_body_mib: Annotated[float, typer.Option("--max-body-mib", help="Largest request body, in MiB.")] = 4.0
    request_timeout_s: Annotated[
        float, typer.Option("--request-timeout", help="Seconds for the whole answer to a request.")
    ] = 600.0
    grace_s: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds for what runs to finish after a first SIGTERM.")
    ] = 60.0

    def bounds(self) -> dict[str, Any]:
        """Fields of the server's settings."""
        names = ("max_concurrent", "max_queue", "max_outputs", "max_prompt_tokens", "max_unread_tokens")
        bounds = {name: getattr(self, name) for name in (*names, "request_timeout_s", "grace_s")}
        return bounds | {"max_body_bytes": int(self.max_body_mib * 2**20)}

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class PolicyOptions:
    """By which policy to serve, and what is kept of the traffic."""

    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            help="As in `zlab replay`; if not given, what --registry has live, else hybrid.",
        ),
    ] = None
    may_become: Annotated[
        list[str] | None,
        typer.Option(
            "--may-become", help="Set memory aside for this policy, too; repeat it. Those validated always have it."
        ),
    ] = None
    registry: Annotated[
        Path | None,
        typer.Option("--registry", dir_okay=False, envvar="ZLAB_REGISTRY", help="Serve what is live there."),
    ] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help="The card that this server is, in --registry.")] = None
    target_model: Annotated[
        str | None, typer.Option("--target-model", help="The model that this server is, in --registry; --model.")
    ] = None
    canary_share: Annotated[
        float | None,
        typer.Option("--canary-share", help="Share of blocks and requests, between 0 and 1, of a second lane."),
    ] = None
    record: Annotated[
        Path | None, typer.Option("--record", file_okay=False, help="Record the traffic, without text, below this.")
    ] = None
    record_text: Annotated[
        bool, typer.Option("--record-text", help="Record token ids of prompts and outputs and sessions, too.")
    ] = False

    def target(self, model: str) -> Target | None:
        """What this server is to the registry; None without one. Raises MisuseError, or SimError for a strange name."""
        if self.registry is None:
            if self.gpu is not None or self.target_model is not None:
                raise MisuseError("--gpu and --target-model say what this server is in a --registry, and there is none")
            return None
        if self.gpu is None:
            raise MisuseError("--registry needs --gpu: policies are live for a model on a card")
        return target_of(self.target_model or model.removeprefix(DUMMY), self.gpu)


@dataclass(frozen=True)
class WatchOptions:
    """What a policy is held to while it serves."""

    gates: Annotated[
        Path | None,
        typer.Option("--gates", dir_okay=False, help="Put the policy before back when one of these breaks."),
    ] = None
    window_s: Annotated[
        float, typer.Option("--watch-window", help="Seconds that --gates look back, within the policy's time.")
    ] = 60.0
    min_requests: Annotated[
        int, typer.Option("--watch-min-requests", min=1, help="Fewer say nothing about times and rates.")
    ] = 20

    def read(self) -> Gates | None:
        """The gates. Raises GateError, and MisuseError for a file that is not there."""
        if self.gates is None:
            return None
        try:
            return gates_from_toml(self.gates.read_text("utf-8"), str(self.gates))
        except (OSError, UnicodeDecodeError) as error:
            raise MisuseError(f"no gates can be read from {str(self.gates)!r}: {type(error).__name__}") from error


@with_groups
def serve(
    model: EngineModel = DEFAULT_MODEL,
    *,
    by: PolicyOptions,
    watch: WatchOptions,
    door: DoorOptions,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="Engines behind one door, over Ray Serve: on CUDA a GPU each.")
    ] = 1,
    sizes: SizeOptions,
    memory_utilisation: MemoryShare = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Serve a model over HTTP as the OpenAI API does, on this machine only unless told otherwise.

    The first SIGTERM (or Ctrl-C) lets what runs finish, the second stops. Exit code 0: everything was served; 1: the
    engine failed or requests were cut off; 2: misuse.
    """
    if by.record_text and by.record is None:
        raise MisuseError("--record-text says what --record writes, and there is none")
    engine = engine_settings(
        model,
        "",
        **asdict(sizes),
        memory_share=memory_utilisation,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    del engine["policy"]
    with engine_room():
        exit_code = _serve(engine, by, watch, door, by.target(model), replicas)
    raise typer.Exit(exit_code)


def _serve(
    engine: dict[str, Any],
    by: PolicyOptions,
    watch: WatchOptions,
    door: DoorOptions,
    target: Target | None,
    replicas: int,
) -> int:
    from engine.build import EngineSettings
    from engine.server.keys import Keys, read_keys
    from engine.server.live_trace import RecordSettings
    from engine.server.process import Process
    from engine.server.server import ServerPlan, open_server
    from engine.server.settings import ServerSettings
    from engine.server.watch import WatchSettings

    keys = Keys.of(read_keys(API_KEY, door.api_key_file), read_keys(ADMIN_KEY, door.admin_key_file))
    if not keys.api and not door.open_to_all and not door.is_loopback:
        raise MisuseError(
            f"--host {door.host} is reached from other machines: set ${API_KEY}, give --api-key-file, or say "
            "--open-to-all"
        )
    plan = ServerPlan(
        EngineSettings(may_become=tuple(by.may_become or ()), **engine),
        by.policy,
        ServerSettings(**door.bounds()),
        keys,
        door.served_model,
        by.canary_share,
        by.registry,
        target,
        by.record,
        RecordSettings(with_text=by.record_text),
        watch.read(),
        WatchSettings(watch.window_s, watch.min_requests),
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_S)
    address = (door.host, door.port)
    if replicas > 1:
        if plan.gates is not None:
            raise MisuseError("--gates watches one engine and puts its policy back: it does not go with --replicas")
        from engine.server.replicas import serve_replicas
        from engine.server.replicas_cluster import ClusterSettings

        cluster = ClusterSettings(replicas, plan.engine.device, door.max_concurrent)
        return serve_replicas(partial(open_server, plan), cluster, plan.settings, keys, address)
    house, app = open_server(plan)
    process = Process(app, house, *address)
    process.run()
    house.close(timeout_s=plan.settings.grace_s)
    return process.exit_code
