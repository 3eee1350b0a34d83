"""`zlab serve`: an OpenAI-compatible server whose scheduling policy is known, and can be changed while it runs."""

import ipaddress
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

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
from zlab.options import BlockSize, HostBlocks, KvBlocks, MaxBatchedTokens, MaxModelLen, MaxRunning, PolicyName
from zlab.outcome import MisuseError

LOOPBACK = "127.0.0.1"
API_KEY, ADMIN_KEY = "ZLAB_API_KEY", "ZLAB_ADMIN_KEY"
SERVE_BLOCK_SIZE = 64
SWITCH_S = 0.0005  # the engine's thread gets the interpreter back this soon from the one that talks to clients


def serve(
    model: EngineModel = DEFAULT_MODEL,
    policy: PolicyName = "hybrid",
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = LOOPBACK,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one and prints it.")] = 8000,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="The name that clients use; the model's own if not given.")
    ] = None,
    canary_share: Annotated[
        float | None,
        typer.Option("--canary-share", help="Share of blocks and requests, between 0 and 1, of a second lane."),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option("--replicas", min=1, help="Engines behind one door, over Ray Serve: on CUDA a GPU each."),
    ] = 1,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help=f"API keys, one a line; else ${API_KEY}, else none needed.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option("--admin-key-file", help=f"The admin key; else ${ADMIN_KEY}, else no admin.")
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Listen beyond this machine although there is no API key.")
    ] = False,
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="Most requests under way.")] = 1024,
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Most outputs that wait for room.")] = 1024,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Longest prompt; what the model takes.")
    ] = None,
    max_body_mib: Annotated[float, typer.Option("--max-body-mib", help="Largest request body, in MiB.")] = 4.0,
    request_timeout_s: Annotated[
        float, typer.Option("--request-timeout", help="Seconds for the whole answer to a request.")
    ] = 600.0,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0.0, help="Seconds for what runs to finish after a first SIGTERM.")
    ] = 60.0,
    kv_blocks: KvBlocks = None,
    block_size: BlockSize = SERVE_BLOCK_SIZE,
    max_batched_tokens: MaxBatchedTokens = None,
    max_running: MaxRunning = None,
    max_model_len: MaxModelLen = None,
    host_blocks: HostBlocks = None,
    memory_share: MemoryShare = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Serve a model over HTTP as the OpenAI API does, on this machine only unless told otherwise.

    The first SIGTERM (or Ctrl-C) lets what runs finish, the second stops. Exit code 0: everything was served; 1: the
    engine failed or requests were cut off; 2: misuse.
    """
    engine = engine_settings(
        model,
        policy,
        kv_blocks=kv_blocks,
        block_size=block_size,
        max_batched_tokens=max_batched_tokens,
        max_running=max_running,
        max_model_len=max_model_len,
        host_blocks=host_blocks,
        memory_share=memory_share,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    bounds = {
        "max_concurrent": max_concurrent,
        "max_queue": max_queue,
        "max_prompt_tokens": max_prompt_tokens,
        "max_body_bytes": int(max_body_mib * 2**20),
        "request_timeout_s": request_timeout_s,
        "grace_s": grace_s,
    }
    files = (api_key_file, admin_key_file)
    with engine_room():
        exit_code = _serve(engine, bounds, files, (host, port), open_to_all, canary_share, served_model, replicas)
    raise typer.Exit(exit_code)


def _serve(
    engine: dict[str, Any],
    bounds: dict[str, Any],
    key_files: tuple[Path | None, Path | None],
    address: tuple[str, int],
    open_to_all: bool,
    canary_share: float | None,
    served_model: str | None,
    replicas: int,
) -> int:
    from engine.build import EngineSettings
    from engine.server.app import create_app
    from engine.server.keys import Keys, read_keys
    from engine.server.opening import open_house
    from engine.server.process import Process
    from engine.server.settings import ServerSettings

    settings = ServerSettings(**bounds)
    keys = Keys.of(read_keys(API_KEY, key_files[0]), read_keys(ADMIN_KEY, key_files[1]))
    if not keys.api and not open_to_all and not _is_loopback(address[0]):
        raise MisuseError(
            f"--host {address[0]} is reached from other machines: set ${API_KEY}, give --api-key-file, or say "
            "--open-to-all"
        )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_S)
    if replicas > 1:
        from engine.server.replicas import serve_replicas
        from engine.server.replicas_actor import plain_replica
        from engine.server.replicas_cluster import ClusterSettings

        wanted = EngineSettings(**engine)
        open_replica = plain_replica(wanted, settings, keys, served_model, canary_share)
        return serve_replicas(
            open_replica, ClusterSettings(replicas, wanted.device, settings.max_concurrent), settings, keys, address
        )
    house = open_house(EngineSettings(**engine), settings, keys, served_model, canary_share)
    process = Process(create_app(house), house, *address)
    process.run()
    house.worker.stop(timeout_s=settings.grace_s)
    return process.exit_code


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
