"""The 770 tensors of the released checkpoint, and how they are cut over 1, 2, 4 and 8 devices."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from golden_values import GOLDEN, golden_config, golden_parameters

from grok1_backend.model.config import GrokConfig, load_config
from grok1_backend.model.parameters import init_parameters, leaves
from grok1_backend.model.partition import (
    PARTITION_RULES,
    create_mesh,
    layout,
    partition_spec,
    scales_layout,
)
from grok1_backend.model.quantization import QuantizedWeight8bit

SHARDS = (1, 2, 4, 8)
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference values beside the repo")


@pytest.fixture(scope="module")
def real() -> GrokConfig:
    return load_config("grok1-314b")


@needs_golden
def test_the_770_tensors_are_those_of_the_released_checkpoint(real: GrokConfig) -> None:
    index = json.loads((GOLDEN / "real_314b_index.json").read_text())
    found = [
        [f"tensor{i:05d}_000", f"params/{leaf.name}", list(leaf.shape)]
        for i, leaf in enumerate(leaves(real))
    ]
    assert len(found) == 770
    assert found == [entry[:3] for entry in index]


@needs_golden
def test_the_model_axis_cuts_where_xai_cuts(real: GrokConfig) -> None:
    """Their specs also cut over `data`, which is for replicas here; and they cut the embedding
    over its width, where logits would need a vocabulary-wide all-reduce."""
    index = json.loads((GOLDEN / "real_314b_index.json").read_text())
    for leaf, (_, _, _, theirs) in zip(leaves(real), index, strict=True):
        spec = theirs.removeprefix("PartitionSpec(").removesuffix(")")
        ours = partition_spec(leaf.name)
        if leaf.name.endswith("embeddings"):
            assert spec == "None, ('data', 'model')"
            assert list(ours) == ["model", None]
        else:
            cut = [part.strip() == "'model'" for part in spec.strip(",").split(",")]
            cut += [False] * (len(leaf.shape) - len(cut))  # axes left out are not cut
            assert [axis == "model" for axis in ours] == cut, leaf.name


@needs_golden
def test_dtypes_are_those_of_the_released_format() -> None:
    index = json.loads((GOLDEN / "ckpt_index.json").read_text())
    expected = [(entry[1].removeprefix("params/"), entry[2]) for entry in index]
    kinds = {True: "QuantizedWeight8bit", False: "ndarray"}
    assert [(leaf.name, kinds[leaf.quantized]) for leaf in leaves(golden_config())] == expected


@needs_golden
def test_names_and_shapes_are_those_of_xais_haiku_modules() -> None:
    theirs = {name: array.shape for name, array in golden_parameters("params_float.npz").items()}
    assert {leaf.name: leaf.shape for leaf in leaves(golden_config())} == theirs
    ours = init_parameters(golden_config(), seed=0)
    assert {name: array.shape for name, array in ours.items()} == theirs


def covered(parts: list[tuple[slice, ...]], shape: tuple[int, ...], axis: int | None) -> Any:
    """How many shards hold each index of the axis that is cut."""
    count = np.zeros(1 if axis is None else shape[axis], int)
    for part in parts:
        for other, (held, size) in enumerate(zip(part, shape, strict=True)):
            assert other == axis or (held.start, held.stop) == (0, size)
        count[slice(None) if axis is None else part[axis]] += 1
    return count


@pytest.mark.parametrize("shards", SHARDS)
def test_every_tensor_is_held_once_and_in_equal_parts(real: GrokConfig, shards: int) -> None:
    for leaf in leaves(dataclasses.replace(real, num_layers=1)):
        cut = layout(leaf.name, leaf.shape, real, shards)
        parts = [cut.slices(shard) for shard in range(shards)]
        assert len({tuple(part.stop - part.start for part in held) for held in parts}) == 1
        assert set(covered(parts, leaf.shape, cut.axis)) == {shards if cut.axis is None else 1}
        assert cut.global_shape == leaf.shape


RELEASED_SCALES = {
    "moe/linear/w": (8, 1, 32768),
    "moe/linear_v/w": (8, 1, 32768),
    "moe/linear_1/w": (8, 8, 6144),
    "multi_head_attention/linear/w": (8, 6144),
    "multi_head_attention/query/w": (1, 6144),
    "multi_head_attention/key/w": (1, 1024),
    "multi_head_attention/value/w": (1, 1024),
}


@pytest.mark.parametrize("shards", [*SHARDS, 16])
def test_scales_go_with_their_rows_and_columns(real: GrokConfig, shards: int) -> None:
    """Row k of a weight is scaled by group k · groups / rows, on whichever shard it lies."""
    for leaf in leaves(dataclasses.replace(real, num_layers=1)):
        if not leaf.quantized:
            continue
        kind = "/".join(leaf.name.split("/")[-3:])
        scales_shape = RELEASED_SCALES[kind]
        weight = layout(leaf.name, leaf.shape, real, shards)
        scales = scales_layout(leaf.name, scales_shape, real, shards)
        per_group = leaf.shape[-2] // scales_shape[-2]
        for shard in range(shards):
            rows, groups = weight.slices(shard)[-2], scales.slices(shard)[-2]
            assert weight.slices(shard)[-1] == scales.slices(shard)[-1]
            assert groups.start * per_group <= rows.start
            assert rows.stop <= groups.stop * per_group


@pytest.mark.parametrize(("shards", "heads", "share"), [(8, 2, 4), (4, 2, 2), (8, 8, 1)])
def test_few_kv_heads_are_repeated(shards: int, heads: int, share: int) -> None:
    config = dataclasses.replace(load_config("grok1-314b"), num_kv_heads=heads)
    name = "transformer/decoder_layer_0/multi_head_attention/key/w"
    shape = (config.emb_size, heads * config.key_size)
    cut = layout(name, shape, config, shards)
    parts = [cut.slices(shard) for shard in range(shards)]
    assert set(covered(parts, shape, 1)) == {share}
    assert cut.global_shape == (config.emb_size, max(heads, shards) * config.key_size)


def test_a_tensor_that_does_not_divide_is_refused() -> None:
    config = load_config("grok1-314b")
    name = "transformer/decoder_layer_0/moe/linear/w"
    with pytest.raises(ValueError, match=r"moe/linear/w of shape .* do not divide over 3 model"):
        layout(name, (8, 6144, 32768), config, 3)
    with pytest.raises(ValueError, match="48 units along axis 1 do not divide over 7"):
        layout("x/multi_head_attention/query/w", (6144, 6144), config, 7)


def test_a_parameter_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="no partition rule for the parameter transformer/bias"):
        partition_spec("transformer/bias")


def test_every_rule_is_of_use(real: GrokConfig) -> None:
    """And none shadows another: the rule that a name finds is the only one that matches."""
    import re

    names = [leaf.name for leaf in leaves(dataclasses.replace(real, num_layers=1))]
    matches = {name: [p for p, _ in PARTITION_RULES if re.search(p, name)] for name in names}
    assert all(len(found) == 1 for found in matches.values())
    assert {found[0] for found in matches.values()} == {pattern for pattern, _ in PARTITION_RULES}


def test_a_mesh_needs_its_devices() -> None:
    count = len(jax.devices())
    with pytest.raises(ValueError, match=rf"needs {count + 1} devices, {count} are visible"):
        create_mesh((1, count + 1))


def test_quantized_weights_tell_the_shape_they_stand_for() -> None:
    weight = QuantizedWeight8bit(np.zeros((3, 4), np.int8), np.ones((1, 4)))  # type: ignore[arg-type]
    assert weight.shape == (3, 4)
    assert weight.dtype == np.int8
