"""int8 weights: exact products, groups of scales, and no float copy of a weight in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grok1_backend.model import quantization, steps
from grok1_backend.model.config import GrokConfig, load_config
from grok1_backend.model.parameters import leaves
from grok1_backend.model.partition import create_mesh, layout, stack_sharding
from grok1_backend.model.quantization import (
    LayerSlice,
    QuantizedWeight8bit,
    matmul,
    quantize,
    tile_rows,
)

Array = np.ndarray[Any, Any]


def floats(weight: QuantizedWeight8bit) -> Array:
    """What an int8 weight stands for, in float64."""
    groups = weight.scales.shape[-2]
    scales = np.repeat(np.float64(weight.scales), weight.shape[-2] // groups, axis=-2)
    return np.float64(weight.weight) * scales


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tile_bytes", [4 * 24 * 3, quantization.TILE_BYTES])
def test_products_scale_each_group(
    groups: int, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "TILE_BYTES", tile_bytes)
    rng = np.random.default_rng(groups)
    stack = quantize(jnp.asarray(rng.normal(size=(2, 3, 48, 24)), jnp.float32), groups)
    x = rng.normal(size=(5, 48)).astype(np.float32)
    expected = np.float64(x) @ floats(stack)
    of_layer = jax.jit(lambda x, stack: matmul(x, LayerSlice(stack, jnp.int32(1)), jnp.int32(2)))
    np.testing.assert_allclose(of_layer(x, stack), expected[1, 2], rtol=1e-5, atol=1e-4)
    one = QuantizedWeight8bit(stack.weight[0, 1], stack.scales[0, 1])
    np.testing.assert_allclose(jax.jit(matmul)(x, one), expected[0, 1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_quantize_is_as_near_as_127_steps_allow(groups: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(3, 32, 16)).astype(np.float32)
    weight[0, :, 3] = 0.0
    quantized = quantize(jnp.asarray(weight), groups)
    assert quantized.weight.dtype == jnp.int8
    assert quantized.scales.dtype == jnp.bfloat16
    assert quantized.scales.shape == (3, groups, 16)
    largest = np.abs(weight.reshape(3, groups, -1, 16)).max(axis=2).repeat(32 // groups, axis=1)
    # Half a step, and what the rounding of the scale to 8 bits moves the largest value by.
    assert (np.abs(floats(quantized) - weight) <= largest * (0.5 / 127 + 2**-8)).all()


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_tiles_of_the_released_model_stay_under_4_mb(shards: int) -> None:
    config = load_config("grok1-314b")
    for leaf in leaves(dataclasses.replace(config, num_layers=1)):
        if leaf.quantized:
            cut = layout(leaf.name, leaf.shape, config, shards)
            *_, rows, columns = (part.stop - part.start for part in cut.slices(0))
            tile = tile_rows(rows, columns)
            assert rows % tile == 0
            assert tile * columns * 4 <= 4 * 2**20
            assert tile * columns * 4 > 2**20, "so small that the loop would cost more"


def test_float_parameters_are_not_taken_from_int8() -> None:
    with pytest.raises(TypeError, match="a float array expected, found a Quantized"):
        quantization.value(quantize(jnp.ones((2, 2))))


WIDE = dataclasses.replace(
    load_config("tiny"), emb_size=2048, widening_factor=8.0, sequence_len=512
)
"""One matrix of an expert: 22 MB in int8, 90 MB in float32; 512 tokens: 4 MB."""
MATRIX = WIDE.emb_size * WIDE.ffn_size


def temporary_bytes(config: GrokConfig, rows: int, tokens: int, dtype: Any) -> int:
    """Of the compiled step, without a byte of weights."""
    mesh = create_mesh()
    stacks: dict[str, Any] = {}
    for leaf in leaves(config):
        shape = leaf.shape if leaf.layer is None else (config.num_layers, *leaf.shape)

        def abstract(shape: tuple[int, ...], dtype: Any, name: str = leaf.stack) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=stack_sharding(mesh, name))

        stacks[leaf.stack] = (
            QuantizedWeight8bit(
                abstract(shape, jnp.int8), abstract((*shape[:-2], 1, shape[-1]), jnp.bfloat16)
            )
            if leaf.quantized
            else abstract(shape, jnp.float32)
        )
    specs = (steps.STEP_INPUT_SPECS,)
    results = (steps.LOGITS_SPEC, steps.POOL_SPECS)
    step = steps.on_mesh(steps.last_logits, stacks, mesh, config, dtype, specs, results)
    pages = jax.ShapeDtypeStruct(
        (config.num_layers, 64, 16, config.num_kv_heads, config.key_size), dtype
    )
    ints = {
        "tokens": (rows, tokens),
        "starts": (rows,),
        "lengths": (rows,),
        "block_table": (rows, 32),
    }
    inputs = steps.StepInput(
        **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in ints.items()}
    )
    lowered = jax.jit(step, donate_argnums=1).lower(stacks, steps.KVPool(pages, pages), inputs)
    return int(lowered.compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (8, 1), (1, 32), (1, 512)])
def test_no_float_copy_of_an_experts_weights(rows: int, tokens: int) -> None:
    assert temporary_bytes(WIDE, rows, tokens, jnp.float32) < MATRIX * 4


@pytest.mark.usefixtures("jax_only")
@pytest.mark.parametrize(("rows", "tokens"), [(8, 1), (1, 512)])
def test_nor_one_in_bfloat16(rows: int, tokens: int) -> None:
    assert temporary_bytes(WIDE, rows, tokens, jnp.bfloat16) < MATRIX * 2


@pytest.mark.usefixtures("jax_only")
def test_the_bound_on_memory_is_one_that_a_copy_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "TILE_BYTES", 2**40)
    assert temporary_bytes(WIDE, 8, 1, jnp.float32) > MATRIX * 4
