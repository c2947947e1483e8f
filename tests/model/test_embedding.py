"""The embedding table in int8: what it stands for, how it is loaded, and what it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.engine.memory_plan import released_weights
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.model.config import load_config
from grok1_backend.model.embedding import EmbeddingTable, embed, quantize_table, unembed
from grok1_backend.model.parameters import EMBEDDING, Parameters
from grok1_backend.model.partition import create_mesh
from grok1_backend.score import score
from grok1_backend.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "embedded_model"


def table_of(vocabulary: int, width: int) -> NDArray[np.float32]:
    """Rows of very different sizes, one of them 0."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((vocabulary, width), np.float32)
    table *= np.exp(rng.standard_normal((vocabulary, 1), np.float32))
    table[3] = 0
    return table


def dense(table: EmbeddingTable) -> NDArray[np.float64]:
    assert table.scales is not None
    return np.asarray(table.weight, np.float64) * np.asarray(table.scales, np.float64)[:, None]


def test_each_row_is_rounded_to_steps_of_its_own() -> None:
    table = table_of(50, 33)
    quantized = quantize_table(jnp.asarray(table))
    assert quantized.weight.dtype == jnp.int8
    steps = abs(table).max(axis=1, keepdims=True) / 127
    assert np.all(abs(dense(quantized) - table) <= 0.501 * steps)
    assert not np.any(embed(quantized, jnp.array([3])))


@pytest.mark.parametrize(("vocabulary", "width"), [(50, 33), (5000, 512)])
@pytest.mark.usefixtures("backend")
def test_it_computes_with_the_rows_that_it_stands_for(vocabulary: int, width: int) -> None:
    """Whole, and (in JAX) in tiles."""
    quantized = quantize_table(jnp.asarray(table_of(vocabulary, width)))
    x = np.random.default_rng(1).standard_normal((3, width), np.float32)
    reference = x @ dense(quantized).T
    np.testing.assert_allclose(
        unembed(jnp.asarray(x), quantized), reference, rtol=0, atol=2e-6 * abs(reference).max()
    )
    ids = np.array([[7, 3], [vocabulary - 1, 0]], np.int32)
    np.testing.assert_allclose(embed(quantized, jnp.asarray(ids)), dense(quantized)[ids], rtol=1e-6)


@pytest.fixture(scope="module")
def loaded() -> tuple[Parameters, Parameters]:
    """The embedded model's parameters, exact and with the embedding in int8."""
    config, mesh = load_config(MODEL), create_mesh()
    exact = load_parameters(MODEL, config, mesh)
    return exact, load_parameters(MODEL, config, mesh, int8_embedding=True)


def test_only_the_embedding_is_rounded_when_loaded(loaded: tuple[Parameters, Parameters]) -> None:
    exact, rounded = ({**parameters} for parameters in loaded)
    table, quantized = exact.pop(EMBEDDING), rounded.pop(EMBEDDING)
    expected = quantize_table(jnp.array(table))
    jax.tree.map(np.testing.assert_array_equal, quantized, expected)
    jax.tree.map(np.testing.assert_array_equal, rounded, exact)


def test_the_plan_counts_it(loaded: tuple[Parameters, Parameters]) -> None:
    config = load_config(MODEL)
    sizes = [sum(array.nbytes for array in jax.tree.leaves(parameters)) for parameters in loaded]
    saved = released_weights(config, 1) - released_weights(config, 1, int8_embedding=True)
    assert saved == sizes[0] - sizes[1]


def log_probabilities(parameters: Parameters, tokens: NDArray[np.int32]) -> Iterator[Any]:
    config = load_config(MODEL)
    for chunk in score(parameters, config, create_mesh(), tokens, "float32"):
        yield jax.nn.log_softmax(chunk.logits)


def test_its_quality_on_a_book_that_the_model_has_not_seen(
    loaded: tuple[Parameters, Parameters],
) -> None:
    """Ruth (King James Version), 3,994 positions: KL divergence 5.5e-4, same best token 99.4 %."""
    text = (HERE / "ruth.txt").read_text(encoding="utf-8")
    tokens = np.array(Tokenizer(MODEL / "tokenizer.model").encode(text), np.int32)
    divergence, agreement = [], []
    both = (log_probabilities(parameters, tokens) for parameters in loaded)
    for exact, rounded in zip(*both, strict=True):
        divergence.append(jnp.sum(jnp.exp(exact) * (exact - rounded), axis=1))
        agreement.append(exact.argmax(axis=1) == rounded.argmax(axis=1))
    assert len(tokens) >= 2000
    assert 0 < np.concatenate(divergence).mean() <= 1e-3
    assert np.concatenate(agreement).mean() >= 0.99


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="embedding is 'int4': float32 or int8"):
        RunnerSettings(embedding="int4")
