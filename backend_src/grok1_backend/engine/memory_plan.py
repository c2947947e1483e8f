"""What fits on a device: weights, decode state, activations, a reserve, and the pages of KV left.

All figures but measured weights are formulas over the config and the settings, so that a plan can
be made anywhere; the same plan sizes the pool when a model starts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
from jax.sharding import Mesh

from grok1_backend.engine.decode_state import initial_state
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.model.attention import BLOCK_POSITIONS
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.moe import BLOCK_ROWS
from grok1_backend.model.parameters import EMBEDDING, Leaf, Parameters, leaves
from grok1_backend.model.partition import layout, model_shards, scales_layout
from grok1_backend.model.quantization import TILE_BYTES
from grok1_backend.model.sharding import MODEL_AXIS, ModelShards

RESERVE = 0.08
"""The share of a device's memory that is left alone."""
SCALE_GROUPS = 8
"""Groups of scales along the rows of a released weight whose rows are sharded; others have one."""
_FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Figure:
    """Some bytes of each device, and where the number comes from."""

    name: str
    nbytes: int
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How the memory of each device is used."""

    memory: int
    parts: tuple[Figure, ...]
    """What is taken before the first page."""
    buckets: tuple[Figure, ...]
    """The activations of each compiled step; the largest is among `parts`."""
    page: Figure
    page_size: int
    context_pages: int
    """Pages of one full context."""
    wanted_pages: int
    """Pages that the settings ask for."""

    @property
    def left(self) -> int:
        """Bytes for pages; below 0 where the rest alone does not fit."""
        return self.memory - sum(part.nbytes for part in self.parts)

    @property
    def pages(self) -> int:
        """Pages that fit."""
        return max(0, self.left // self.page.nbytes)

    @property
    def fits(self) -> bool:
        return self.left >= 0 and self.pages >= self.wanted_pages

    @property
    def memory_needed(self) -> int:
        """Of a device on which all that the settings ask for fits."""
        fixed = sum(part.nbytes for part in self.parts if part.name != "reserve")
        return math.ceil((fixed + self.wanted_pages * self.page.nbytes) / (1 - RESERVE))


def plan_memory(
    config: GrokConfig,
    settings: RunnerSettings,
    shards: int,
    memory: int,
    *,
    weights: int | None = None,
) -> MemoryPlan:
    """Plans a device's memory.

    Args:
      shards: devices that share the parameters.
      memory: bytes of each device.
      weights: bytes of the loaded parameters on a device; None for those of the released format
        (int8 with bfloat16 scales, the rest float32).

    Raises:
      ValueError: the model does not divide over so many devices.
    """
    itemsize = 4 if settings.dtype == "float32" else 2
    buckets = tuple(_activations(config, settings, shards, itemsize))
    largest = max(buckets, key=lambda bucket: bucket.nbytes)
    state = jax.eval_shape(functools.partial(initial_state, settings.num_slots, config.vocab_size))
    source = "measured: the parameters as loaded"
    if weights is None:
        rounded = settings.embedding == "int8"
        weights = released_weights(config, shards, int8_embedding=rounded)
        source = f"formula: the tensors as released, over {shards} devices"
        source += ", the embedding in int8" if rounded else ""
    parts = (
        Figure("weights", weights, source),
        Figure(
            "decode state",
            sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(state)),
            f"formula: what {settings.num_slots} slots keep between steps, whole on each device",
        ),
        Figure("activations", largest.nbytes, f"formula: the largest step, {largest.name}"),
        Figure(
            "reserve",
            math.ceil(memory * RESERVE),
            f"{RESERVE:.0%} of the device: collectives, libraries, graphs, fragmentation",
        ),
    )
    kv_heads = ModelShards(shards).local(config.num_kv_heads)
    position = 2 * config.num_layers * kv_heads * config.key_size * itemsize
    return MemoryPlan(
        memory=memory,
        parts=parts,
        buckets=buckets,
        page=Figure(
            "page",
            position * settings.page_size,
            f"formula: keys and values of {kv_heads} of {config.num_kv_heads} heads in "
            f"{settings.dtype}, {config.num_layers} layers, {settings.page_size} positions",
        ),
        page_size=settings.page_size,
        context_pages=-(-config.sequence_len // settings.page_size),
        wanted_pages=settings.pages_for(config),
    )


def released_weights(config: GrokConfig, shards: int, *, int8_embedding: bool = False) -> int:
    """Bytes of the parameters on one device: int8 with bfloat16 scales, the rest float32.

    Args:
      int8_embedding: the embedding is int8 too, with a float32 scale a row.

    Raises:
      ValueError: a tensor does not divide over so many devices.
    """
    one_layer = leaves(dataclasses.replace(config, num_layers=1))
    return sum(
        leaf_bytes(leaf, config, shards, int8_embedding)
        * (1 if leaf.layer is None else config.num_layers)
        for leaf in one_layer
    )


def leaf_bytes(leaf: Leaf, config: GrokConfig, shards: int, int8_embedding: bool = False) -> int:
    """Bytes of one tensor of the checkpoint on each device; see `released_weights`."""

    def elements(cut: tuple[slice, ...]) -> int:
        return math.prod(part.stop - part.start for part in cut)

    weight = layout(leaf.name, leaf.shape, config, shards)
    if leaf.name == EMBEDDING and int8_embedding:
        return elements(weight.slices(0)) + elements(weight.slices(0)[:1]) * _FLOAT
    if not leaf.quantized:
        return elements(weight.slices(0)) * _FLOAT
    by_rows = weight.spec[-2] == MODEL_AXIS
    groups = SCALE_GROUPS if by_rows and leaf.shape[-2] % SCALE_GROUPS == 0 else 1
    scales_shape = (*leaf.shape[:-2], groups, leaf.shape[-1])
    scales = scales_layout(leaf.name, scales_shape, config, shards)
    return elements(weight.slices(0)) + elements(scales.slices(0)) * 2


def _activations(
    config: GrokConfig, settings: RunnerSettings, shards: int, itemsize: int
) -> list[Figure]:
    source = "formula: what is alive at once in attention, experts or logits"
    prefill = itertools.product(settings.prefill_rows, settings.prefill_tokens)
    steps = [(f"prefill of {rows} x {tokens} tokens", rows, tokens) for rows, tokens in prefill]
    steps += [(f"decode of {rows} slots", rows, 1) for rows in settings.decode_rows]
    return [
        Figure(name, step_bytes(config, shards, rows, tokens, itemsize), source)
        for name, rows, tokens in steps
    ]


def step_bytes(config: GrokConfig, shards: int, rows: int, tokens: int, itemsize: int) -> int:
    """Bytes of activations that a step needs on each device, generously: nothing is reused.

    Args:
      rows, tokens: of the step.
      itemsize: of the dtype of products' inputs, in bytes.
    """
    local = ModelShards(shards).local
    heads, kv_heads = local(config.num_q_heads), local(config.num_kv_heads)
    positions, wide = rows * tokens, _FLOAT + itemsize
    residual = 2 * positions * config.emb_size * _FLOAT
    normed = positions * config.emb_size * wide
    per_head = positions * config.key_size
    attention = (
        normed
        + (heads + 2 * kv_heads) * per_head * wide  # projections, before and after rotation
        + 2 * positions * heads * BLOCK_POSITIONS * wide  # logits and weights of a block
        + 2 * rows * BLOCK_POSITIONS * kv_heads * config.key_size * itemsize
        + heads * per_head * (2 * _FLOAT + itemsize)  # sums, twice: the loop's old and new ones
        + positions * config.emb_size * _FLOAT
    )
    block = min(positions, BLOCK_ROWS)
    pairs = positions * config.num_selected_experts + block
    experts = (
        normed
        + 2 * pairs * config.emb_size * (_FLOAT + itemsize)  # the experts' inputs and outputs
        + 3 * block * (config.ffn_size // shards) * wide
        + 2 * TILE_BYTES
        + positions * config.emb_size * _FLOAT
    )
    # The sampler gathers all logits, and its widest variant edits, weighs and filters them.
    logits = 6 * rows * config.vocab_size * _FLOAT
    return residual + max(attention, experts) + logits


def advice(plan: MemoryPlan, config: GrokConfig, settings: RunnerSettings, shards: int) -> str:
    """What to change so that it fits."""
    options = []
    if plan.pages >= 1:
        slots = plan.pages // plan.context_pages
        options.append(f"num_pages of at most {plan.pages}")
        if settings.num_pages is None and slots:
            options.append(f"num_slots of at most {slots}")
    if settings.dtype == "float32":
        options.append('dtype = "bfloat16"')
    for devices in (shards * 2**power for power in range(1, 7)):
        try:
            if plan_memory(config, settings, devices, plan.memory).fits:
                options.append(f"{devices} devices")
                break
        except ValueError:
            break  # the model does not divide any further
    options.append(f"devices of at least {shown(plan.memory_needed)}")
    return "it does not fit; change one of: " + "; ".join(options)


def size_pool(
    config: GrokConfig, settings: RunnerSettings, parameters: Parameters, mesh: Mesh
) -> RunnerSettings:
    """The settings with as many pages as fit beside loaded parameters, where none are set.

    Where the backend does not tell a device's memory (CPU) the settings stay as they are.

    Raises:
      ValueError: what is asked for does not fit, or the device has less left than the plan says
        because something else holds some of it.
    """
    device = mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return settings
    weights = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(parameters))
    shards, memory = model_shards(mesh), int(stats["bytes_limit"])
    plan = plan_memory(config, settings, shards, memory, weights=weights)
    if not plan.fits:
        raise ValueError(advice(plan, config, settings, shards))
    pages = plan.wanted_pages if settings.num_pages is not None else plan.pages
    planned = plan.page.nbytes * pages + sum(
        part.nbytes for part in plan.parts if part.name not in ("weights", "reserve")
    )
    free = memory - int(stats.get("bytes_in_use", 0))
    if planned > free:
        raise ValueError(
            f"{shown(planned)} are planned for pages, decode state and activations, "
            f"{shown(free)} are free on {device}: something else holds memory there"
        )
    return dataclasses.replace(settings, num_pages=pages)


def shown(nbytes: int) -> str:
    """`37.06 GiB`."""
    sign, size = "-" if nbytes < 0 else "", abs(nbytes)
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size / 2**10:.2f} KiB"
