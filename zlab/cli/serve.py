"""Options of `zlab serve`: who may come in, by which policy to serve, what a policy is held to
meanwhile.

`zlab serve`: an OpenAI-compatible server whose scheduling policy is known, and can be changed while
it runs.
"""

import ipaddress
import logging
import math
import socket
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from zlab.cli.console import MisuseError
from zlab.cli.options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    EngineModel,
    MemoryShare,
    Seed,
    SizeOptions,
    engine_room,
    engine_settings,
    registry_at,
    target_of,
    with_groups,
)
from zlab.policies.evidence import Target
from zlab.policies.gates import Gates, gates_from_toml
from zlab.sim.specs import SimError, find_model

LOOPBACK = "127.0.0.1"
API_KEY, ADMIN_KEY = "ZLAB_API_KEY", "ZLAB_ADMIN_KEY"
DUMMY = "dummy:"


@dataclass(frozen=True)
class DoorOptions:
    """Who may come in from where, and how many."""

    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = LOOPBACK
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="0 takes a free one; the log says which."),
    ] = 8000
    served_model: Annotated[
        str | None,
        typer.Option(
            "--served-model", show_default="the model's own", help="The name that clients use."
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            show_default=f"${API_KEY}, else none needed",
            help="API keys, one a line.",
        ),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file",
            show_default=f"${ADMIN_KEY}, else nobody can",
            help="The admin key, to change policies.",
        ),
    ] = None
    open_to_all: Annotated[
        bool,
        typer.Option(
            "--open-to-all", help="Listen beyond this machine although there is no API key."
        ),
    ] = False
    max_concurrent: Annotated[
        int, typer.Option("--max-concurrent", min=1, help="Most requests under way; more get 429.")
    ] = 1024
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", min=1, help="Most outputs that wait for room; more get 429."),
    ] = 1024
    max_outputs: Annotated[
        int,
        typer.Option(
            "--max-outputs", min=1, help="Most outputs of one request: its prompts times n."
        ),
    ] = 128
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens",
            min=1,
            show_default="what the model takes",
            help="Longest prompt in tokens.",
        ),
    ] = None
    max_unread_tokens: Annotated[
        int,
        typer.Option(
            "--max-unread-tokens", min=1, help="How many tokens a stream's reader may fall behind."
        ),
    ] = 2048
    cors_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            help="Let pages of this origin (https://host:port, or *) call the server; repeat it.",
        ),
    ] = None
    max_body_mib: Annotated[
        float, typer.Option("--max-body-mib", help="Largest request body, in MiB.")
    ] = 4.0
    request_timeout_s: Annotated[
        float, typer.Option("--request-timeout", help="Seconds for the whole answer to a request.")
    ] = 600.0
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace", help="Seconds for what runs to finish after a first SIGTERM; 0: none."
        ),
    ] = 60.0
    stall_s: Annotated[
        float,
        typer.Option("--stall", help="Seconds of one step after which /health answers 503."),
    ] = 120.0
    decision_s: Annotated[
        float,
        typer.Option(
            "--decision-timeout",
            help="Seconds for one decision of the policy; a policy that takes longer is "
            "interrupted, and the one before it decides again.",
        ),
    ] = 5.0

    def bounds(self) -> dict[str, Any]:
        """Fields of the server's settings. Raises MisuseError."""
        names = (
            "max_concurrent",
            "max_queue",
            "max_outputs",
            "max_prompt_tokens",
            "max_unread_tokens",
        )
        seconds = ("request_timeout_s", "grace_s", "stall_s", "decision_s")
        bounds = {name: getattr(self, name) for name in (*names, *seconds)}
        _check_amount("--max-body-mib", self.max_body_mib)
        _check_amount("--request-timeout", self.request_timeout_s)
        _check_amount("--grace", self.grace_s, may_be_0=True)
        _check_amount("--stall", self.stall_s)
        _check_amount("--decision-timeout", self.decision_s)
        return bounds | {
            "max_body_bytes": math.ceil(self.max_body_mib * 2**20),
            "cors_origins": tuple(self.cors_origins or ()),
        }

    def check_free(self) -> None:
        """Raise MisuseError where nobody could listen there, before a model is loaded for
        nothing.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            with socket.socket(*found[0][:3]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[0][4])
        except OSError as error:
            raise MisuseError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror} (--port 0 "
                f"takes a free port)"
            ) from error

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
            show_default="what --registry has live, else hybrid",
            help="As in `zlab replay`.",
        ),
    ] = None
    may_become: Annotated[
        list[str] | None,
        typer.Option(
            "--may-become",
            help="Set memory aside for this policy, too, so that it can take over; repeat it. "
            "Those validated in --registry always have it.",
        ),
    ] = None
    registry: Annotated[
        Path | None,
        typer.Option(
            "--registry",
            dir_okay=False,
            envvar="ZLAB_REGISTRY",
            help="Serve what is live there, if --policy is not given; rollbacks of --gates are "
            "written there.",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="The card that this server is to --registry, as `zlab validate --gpu` names it.",
        ),
    ] = None
    target_model: Annotated[
        str | None,
        typer.Option(
            "--target-model",
            show_default="--model",
            help="The model that this server is to --registry, as `zlab validate --model` "
            "names it.",
        ),
    ] = None
    canary_share: Annotated[
        float | None,
        typer.Option(
            "--canary-share",
            help="Open a lane for a canary, with this share of blocks and requests, as 0.1.",
        ),
    ] = None
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", file_okay=False, help="Record the traffic, without text, below this folder."
        ),
    ] = None
    record_text: Annotated[
        bool,
        typer.Option(
            "--record-text", help="Record token ids of prompts and outputs and sessions, too."
        ),
    ] = False

    def target(self, model: str) -> Target | None:
        """What this server is to the registry; None without one. Raises MisuseError, or SimError
        for a strange name.
        """
        if self.registry is None:
            if self.gpu is not None or self.target_model is not None:
                raise MisuseError(
                    "--gpu and --target-model say what this server is in a --registry, and "
                    "there is none"
                )
            return None
        if self.gpu is None:
            raise MisuseError("--registry needs --gpu: policies are live for a model on a card")
        if self.policy is None:
            registry_at(self.registry)  # there is nothing else to serve by
        if self.target_model is not None:
            return target_of(self.target_model, self.gpu)
        name = model.removeprefix(DUMMY)
        try:
            find_model(name)
        except SimError as error:
            raise MisuseError(
                f"{error}. --target-model says which one --model {model} is, in --registry"
            ) from error
        return target_of(name, self.gpu)


@dataclass(frozen=True)
class WatchOptions:
    """What a policy is held to while it serves."""

    gates: Annotated[
        Path | None,
        typer.Option(
            "--gates",
            dir_okay=False,
            help="Watch the gates of this file, and put the policy before back when one breaks.",
        ),
    ] = None
    window_s: Annotated[
        float | None,
        typer.Option(
            "--watch-window",
            show_default="60",
            help="Seconds that --gates look back, within the policy's time.",
        ),
    ] = None
    min_requests: Annotated[
        int | None,
        typer.Option(
            "--watch-min-requests",
            min=1,
            show_default="20",
            help="Fewer say nothing to --gates about times and rates.",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Fields of the watch's settings that are given. Raises MisuseError."""
        if self.window_s is not None:
            _check_amount("--watch-window", self.window_s)
        options = {"window_s": "--watch-window", "min_requests": "--watch-min-requests"}
        given = {name: getattr(self, name) for name in options if getattr(self, name) is not None}
        if given and self.gates is None:
            named = " and ".join(options[name] for name in given)
            raise MisuseError(f"{named} would say how --gates are watched, and there are none")
        return given

    def read(self) -> Gates | None:
        """The gates. Raises GateError, and MisuseError for a file that is not there."""
        if self.gates is None:
            return None
        try:
            return gates_from_toml(self.gates.read_text("utf-8"), str(self.gates))
        except (OSError, UnicodeDecodeError) as error:
            raise MisuseError(
                f"no gates can be read from {str(self.gates)!r}: {type(error).__name__}"
            ) from error


def _check_amount(option: str, value: float, *, may_be_0: bool = False) -> None:
    """Raise MisuseError unless it is finite and above 0, or 0 where that is a choice."""
    if value == math.inf:
        raise MisuseError(f"{option} must be finite, not {value:g}")
    if not (value > 0 or (may_be_0 and value == 0)):
        raise MisuseError(
            f"{option} must be {'0 or more' if may_be_0 else 'above 0'}, not {value:g}"
        )


@with_groups
def serve(
    model: EngineModel = DEFAULT_MODEL,
    *,
    by: PolicyOptions,
    watch: WatchOptions,
    door: DoorOptions,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Engines behind one address, a process each; on CUDA a GPU each.",
        ),
    ] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            show_default="this machine",
            help="Place the replicas on this Ray cluster: its address, or auto.",
        ),
    ] = None,
    sizes: SizeOptions,
    memory_utilisation: MemoryShare = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Serve a model over HTTP as the OpenAI API does, on this machine only unless told otherwise.

    Requests are scheduled by a policy that can be looked at (GET /v1/policy) and changed between
    two steps (with the admin key: `zlab promote --live URL`). A lane is a scheduler with blocks of
    its own on the loaded model: there is the lane `live`, and with --canary-share the lane `canary`
    for a candidate. More in docs/SERVE.md.

    The first SIGTERM (or Ctrl-C) lets what runs finish, the second stops. Exit code 0: everything
    was served; 1: the engine failed or requests were cut off; 2: misuse.
    """
    if by.record_text and by.record is None:
        raise MisuseError("--record-text says what --record writes, and there is none")
    if by.canary_share is not None and not 0 < by.canary_share < 1:
        raise MisuseError(f"--canary-share must be between 0 and 1, not {by.canary_share:g}")
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
        exit_code = _serve(engine, by, watch, door, by.target(model), replicas, cluster)
    raise typer.Exit(exit_code)


def _serve(
    engine: dict[str, Any],
    by: PolicyOptions,
    watch: WatchOptions,
    door: DoorOptions,
    target: Target | None,
    replicas: int,
    cluster: str | None,
) -> int:
    from zlab.engine.engine import EngineSettings
    from zlab.engine.server.auto_rollback import WatchSettings
    from zlab.engine.server.context import ServerSettings
    from zlab.engine.server.launch import Process, ServerPlan, open_server
    from zlab.engine.server.middleware import Keys, read_keys
    from zlab.engine.server.traffic_recorder import RecordSettings

    keys = Keys.of(read_keys(API_KEY, door.api_key_file), read_keys(ADMIN_KEY, door.admin_key_file))
    if not keys.api and not door.open_to_all and not door.is_loopback:
        raise MisuseError(
            f"--host {door.host} is reached from other machines: set ${API_KEY}, give "
            f"--api-key-file, or say "
            "--open-to-all"
        )
    bounds, watched = door.bounds(), watch.settings()
    door.check_free()
    plan = ServerPlan(
        EngineSettings(may_become=tuple(by.may_become or ()), **engine),
        by.policy,
        ServerSettings(**bounds),
        keys,
        door.served_model,
        by.canary_share,
        by.registry,
        target,
        by.record,
        RecordSettings(with_text=by.record_text),
        watch.read(),
        WatchSettings(**watched),
    )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    address = (door.host, door.port)
    if replicas > 1 or cluster is not None:
        if plan.gates is not None:
            raise MisuseError(
                "--gates watches one engine and puts its policy back: it does not go with "
                "--replicas"
            )
        from zlab.engine.server.replicas.processes import ReplicaSettings, serve_replicas

        # The front answers pages of other origins; a second header would break their browsers.
        behind = replace(plan, settings=replace(plan.settings, cors_origins=()))
        open_replica = partial(open_server, behind)
        settings = ReplicaSettings(replicas, plan.engine.device)
        if cluster is None:
            return serve_replicas(open_replica, settings, plan.settings, keys, address)
        from zlab.engine.server.replicas.ray_cluster import serve_cluster

        return serve_cluster(cluster, open_replica, settings, plan.settings, keys, address)
    context, app = open_server(plan)
    process = Process(app, context, *address)
    process.run()
    context.close(timeout_s=plan.settings.grace_s)
    return process.exit_code
