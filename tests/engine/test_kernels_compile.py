"""Every Triton kernel compiles for the H200 (sm_90) on a machine without a GPU, and fits a
multiprocessor.

The interpreter runs what the compiler may refuse (types that change in a loop, layouts, too much
shared memory), so the launches of a Qwen3-8B-shaped model are recorded on tensors without data, and
compiled from there.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.kernel_cases import INTERPRETED
from zlab.engine.compression import CompressionSettings, compress
from zlab.engine.kernels.backends import find_backend
from zlab.engine.kernels.triton_decode import reserve_decode_workspace
from zlab.engine.kernels.workspace import CompressionRequest, CompressionShape, CompressionWorkspace
from zlab.engine.sampling.torch_ops import FilterSettings

SHARED_MEMORY_BYTES = 227 * 1024  # that one program may have on Hopper
META = torch.device("meta")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
KERNELS = (
    "_first_pass",
    "_reduce_rows",
    "_second_pass",
    "_lightning_kernel",
    "_pairs_kernel",
    "_combine_kernel",
    "_random_kernel",
    "_select_kernel",
    "_compact_kernel",
    "_distinct_kernel",
    "_plan_kernel",
    "_split_kernel",
    "_prefill_kernel",
    "_store_kernel",
    "_threshold_kernel",
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")


@dataclass(frozen=True)
class Launched:
    """One launch as `triton.compile` wants it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, Any]


def as_source(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Launched:
    """What the launcher specialises on: types, constants, and arguments that are multiples of
    16.
    """
    names = kernel.arg_names
    bound = dict(zip(names, arguments, strict=False))
    bound |= {name: value for name, value in keywords.items() if name in names}
    options = {name: value for name, value in keywords.items() if name not in names}
    found = Launched(kernel, {}, {}, {}, options)
    for place, name in enumerate(names):
        value, parameter = bound[name], kernel.params[place]
        if parameter.is_constexpr:
            found.signature[name], found.constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            found.signature[name], found.attributes[(place,)] = (
                TYPES[value.dtype],
                [["tt.divisibility", 16]],
            )
        elif isinstance(value, int):
            found.signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                found.attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            found.signature[name] = "fp32"
    return found


def launch_everything() -> None:
    """Qwen3-8B: 36 layers, 32 query and 8 KV heads of 128, blocks of 256, one request of 9 blocks
    and one of 20.
    """
    kernels = find_backend(META, "triton")
    cache_k, cache_v = (
        torch.empty(36, 32, 256, 8, 128, dtype=torch.bfloat16, device=META) for _ in range(2)
    )
    window = torch.empty(36, 4, 16, 32, 128, dtype=torch.bfloat16, device=META)
    history = torch.empty(36, 32, 256, 8, device=META)
    rotation = torch.empty(40_960, 128, dtype=torch.float16, device=META)
    workspace = CompressionWorkspace(
        CompressionShape(36, 8, 4, 16, 256), capacity_blocks=20, max_requests=1, device=META
    )
    for scorer, num_blocks in (
        ("attention+global+lightning", 9),
        ("attention", 20),
        ("attention+full-redundancy", 9),
        ("random", 9),
        ("distinct", 9),
    ):
        request = CompressionRequest(tuple(range(num_blocks)), tuple(range(8)), query_slot=0)
        settings = CompressionSettings(scorer=scorer)
        tensors = (cache_k, cache_v, history, window)
        compress(*tensors, [request], settings, workspace, kernels=kernels, rotation=rotation)
    queries = torch.empty(64, 32, 128, dtype=torch.bfloat16, device=META)
    keys = torch.empty(64, 8, 128, dtype=torch.bfloat16, device=META)
    ints = torch.empty(65, dtype=torch.int32, device=META)
    tables = torch.empty(64, 9, dtype=torch.int32, device=META)
    splits = reserve_decode_workspace(
        max_length=40_960,
        max_requests=64,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
        device=META,
    )
    layer_k, layer_v = cache_k[0], cache_v[0]
    plan = kernels.plan_decodes(ints[:64], splits, 131_072)
    kernels.decode_attention(queries, layer_k, layer_v, tables, plan, 0.1, splits, queries)
    kernels.prefill_attention(queries, layer_k, layer_v, tables, ints[:64], ints, 0.1, queries)
    kernels.store(keys, keys, ints[:64], layer_k, layer_v, queries, ints[:64], window[0])
    kernels.store(keys, keys, ints[:64].long(), layer_k, layer_v)
    find_borders()


def find_borders() -> None:
    """Of 176 rows of the vocabulary, as the head leaves them and as penalties do."""
    fused_threshold = importlib.import_module("zlab.engine.sampling.triton_ops")
    floats, rows = torch.empty(176, device=META), torch.empty(176, dtype=torch.int64, device=META)
    asked = FilterSettings(rows, top_k=rows, top_p=floats, min_p=floats, widest_k=0, sorts=True)
    for dtype in (torch.bfloat16, torch.float32):
        fused_threshold.thresholds(
            torch.empty(176, 151_936, dtype=dtype, device=META), floats, asked
        )


@pytest.fixture(scope="module")
def launches() -> list[Launched]:
    jit = pytest.importorskip("triton.runtime.jit")
    recorded: list[Launched] = []

    def record(self: Any, *arguments: Any, grid: object, warmup: bool, **keywords: Any) -> None:
        recorded.append(as_source(self, arguments, keywords))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "run", record)
        launch_everything()
    return recorded


def test_all_kernels_are_launched(launches: list[Launched]) -> None:
    assert {launch.kernel.__name__ for launch in launches} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_sm_90(
    name: str, launches: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns that its default will change
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    seen: list[Launched] = []
    for launch in launches:
        same = any(
            launch.signature == other.signature and launch.constants == other.constants
            for other in seen
        )
        if launch.kernel.__name__ != name or same:
            continue
        seen.append(launch)
        source = triton.compiler.ASTSource(
            launch.kernel, launch.signature, launch.constants, launch.attributes
        )
        compiled = triton.compile(source, target=target, options=launch.options)
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
        assert compiled.asm["cubin"]
    assert seen
