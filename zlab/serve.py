"""`zlab serve`: an OpenAI-compatible server whose scheduling policy is known, and can be changed while it runs."""

import logging
import sys
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from policies.evidence import Target
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
from zlab.serve_options import ADMIN_KEY, API_KEY, DoorOptions, PolicyOptions, WatchOptions

SWITCH_S = 0.0005  # the engine's thread gets the interpreter back this soon from the one that talks to clients


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

    Requests are scheduled by a policy that can be looked at (GET /v1/policy) and changed between two steps (with the
    admin key: `zlab promote --live URL`). A lane is a scheduler with blocks of its own on the loaded model: there is
    the lane `live`, and with --canary-share the lane `canary` for a candidate. More in docs/SERVE.md.

    The first SIGTERM (or Ctrl-C) lets what runs finish, the second stops. Exit code 0: everything was served; 1: the
    engine failed or requests were cut off; 2: misuse.
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
