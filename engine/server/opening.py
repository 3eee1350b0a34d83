"""From settings to a house that is open: model loaded, lanes built, the engine's thread running."""

import time
from collections.abc import Sequence
from functools import partial

from engine.build import EngineSettings
from engine.loading import LoadedModel
from engine.server.house import House
from engine.server.keys import Keys
from engine.server.lanes import Lane, MakeSink, build_lanes
from engine.server.limits import Door
from engine.server.observing import Observer
from engine.server.prompts import Prompts
from engine.server.settings import ServerSettings
from engine.server.worker import EngineWorker


def open_house(
    engine: EngineSettings,
    settings: ServerSettings | None = None,
    keys: Keys | None = None,
    served_model: str | None = None,
    canary_share: float | None = None,
    observers: Sequence[Observer] = (),
    loaded: LoadedModel | None = None,
) -> House:
    """Start a worker and put up what the routes share; stop the worker to close it.

    `served_model` is the name that clients use, the model's own if None. `loaded` is used instead of loading.
    Raises what building an engine raises.
    """
    settings = settings or ServerSettings()
    worker = EngineWorker(partial(_build, engine, loaded, canary_share), settings.worker, observers)
    worker.start()
    first = worker.call(lambda lanes: lanes[0].engine).result()
    return House(
        worker=worker,
        settings=settings,
        keys=keys or Keys(),
        door=Door(settings.max_concurrent, lambda: worker.retry_after_s),
        prompts=Prompts(first.loaded, settings.max_prompt_tokens),
        served_model=served_model or first.loaded.config.name,
        max_model_len=first.limits.max_model_len,
        started_unix_s=time.time(),
    )


def _build(
    engine: EngineSettings, loaded: LoadedModel | None, canary_share: float | None, make_sink: MakeSink
) -> list[Lane]:
    return build_lanes(engine, loaded, canary_share, make_sink)
