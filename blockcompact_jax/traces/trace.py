"""A recorded trace: rotated queries and keys of one text, so that selection needs no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int32, Shaped

from blockcompact_jax.errors import CompactionError
from blockcompact_jax.geometry import GroupGeometry, LayerGeometry, LayerKind, ModelGeometry

AnyNumpy: TypeAlias = np.ndarray[Any, Any]

TRACE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Element types of queries and keys, by the names of geometry."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionTrace:
    """Queries and keys of the recorded full-attention layers, along one text.

    The text is a context and the tokens forced after it, computed with full attention. All layers
    have the same heads. `row` counts the recorded layers, in the order of `layers`.

    Attributes:
        model: What the model was asked for as.
        weights: Architecture and digest of the weights.
        model_dtype: Element type that the model computed in.
        dtype: Element type of `queries` and `keys`: "float32" or "bfloat16".
        source: Where the text came from, for people.
        num_context_tokens: Tokens of the context; the others were forced after it.
        num_model_layers: Decoder layers of the model, recorded or not.
        layers: Decoder layer IDs of the recorded layers, ascending. int32 [row].
        scales: Softmax scale of each layer. float32 [row].
        token_ids: Vocabulary IDs of token positions 0 … num_tokens-1. int32 [token].
        query_positions: Token positions whose queries were recorded, ascending. int32 [query].
        queries: Rotated queries [row, query_head, query, head_dim].
        keys: Rotated keys [row, kv_head, token, head_dim].
        origin: Machine, versions and source hashes of the recording, as plain JSON values.
    """

    model: str
    weights: str
    model_dtype: str
    dtype: str
    source: str
    num_context_tokens: int
    num_model_layers: int
    layers: Int32[np.ndarray, " row"]
    scales: Float32[np.ndarray, " row"]
    token_ids: Int32[np.ndarray, " token"]
    query_positions: Int32[np.ndarray, " query"]
    queries: Shaped[np.ndarray, "row query_head query head_dim"]
    keys: Shaped[np.ndarray, "row kv_head token head_dim"]
    origin: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return int(self.token_ids.size)

    @property
    def num_rows(self) -> int:
        """Recorded layers."""
        return int(self.layers.size)

    @property
    def nbytes(self) -> int:
        """Bytes of queries and keys."""
        return self.queries.nbytes + self.keys.nbytes

    def geometry(self, block_tokens: int) -> ModelGeometry:
        """The recorded layers as a model of their own, with blocks of `block_tokens`.

        Raises:
            CompactionError: If `block_tokens` is below 1.
        """
        layers = tuple(
            LayerGeometry(
                layer=int(layer),
                kind=LayerKind.FULL,
                num_query_heads=self.queries.shape[1],
                num_kv_heads=self.keys.shape[1],
                head_dim=self.keys.shape[3],
            )
            for layer in self.layers
        )
        group = GroupGeometry(group=0, layers=tuple(int(layer) for layer in self.layers))
        return ModelGeometry(
            layers=layers,
            groups=(group,),
            block_tokens=block_tokens,
            dtype=self.dtype,
            layout="plain_hnd",
        )


def check_trace(trace: AttentionTrace) -> None:
    """Refuses a trace whose parts do not fit together, or that holds a number that is not finite.

    Raises:
        CompactionError: Naming the part, what it is and what was expected.
    """
    if trace.dtype not in TRACE_DTYPES:
        raise CompactionError(
            f"`dtype` of the trace is {trace.dtype!r}; expected one of {', '.join(TRACE_DTYPES)}."
        )
    _check_shapes(trace)
    num_tokens, num_context = trace.num_tokens, trace.num_context_tokens
    if not 1 <= num_context < num_tokens:
        raise CompactionError(
            f"`num_context_tokens` of the trace is {num_context} of {num_tokens} tokens; expected "
            "at least one, and at least one token after them."
        )
    _check_ascending("layers", trace.layers, trace.num_model_layers)
    _check_ascending("query_positions", trace.query_positions, num_tokens)
    is_after = trace.query_positions >= num_context
    if is_after.all() or not is_after.any():
        raise CompactionError(
            f"`query_positions` of the trace has {int(is_after.sum())} of {is_after.size} after "
            f"the context of {num_context} tokens; expected some before its end, which select, and "
            "some after it, which are measured."
        )
    if not (np.isfinite(trace.scales) & (trace.scales > 0)).all():
        raise CompactionError(
            "`scales` of the trace holds a scale that is not positive; expected the softmax scale "
            "of each layer."
        )
    _check_finite("queries", trace.queries, trace, trace.query_positions)
    _check_finite("keys", trace.keys, trace, np.arange(num_tokens))


def _check_shapes(trace: AttentionTrace) -> None:
    for name, rank in (("layers", 1), ("token_ids", 1), ("query_positions", 1)):
        _check_array(name, getattr(trace, name), np.dtype(np.int32), rank)
    _check_array("scales", trace.scales, np.dtype(np.float32), 1)
    for name in ("queries", "keys"):
        _check_array(name, getattr(trace, name), TRACE_DTYPES[trace.dtype], 4)
    num_rows, num_heads, num_queries, head_dim = trace.queries.shape
    fits = (
        trace.keys.shape == (num_rows, trace.keys.shape[1], trace.num_tokens, head_dim)
        and trace.layers.size == trace.scales.size == num_rows
        and trace.query_positions.size == num_queries
        and num_heads % max(trace.keys.shape[1], 1) == 0
        and min(trace.queries.size, trace.keys.size) > 0
    )
    if not fits:
        raise CompactionError(
            f"the trace has queries {trace.queries.shape}, keys {trace.keys.shape}, "
            f"{trace.layers.size} layers, {trace.scales.size} scales, {trace.num_tokens} tokens "
            f"and {trace.query_positions.size} query positions, which do not fit together; "
            "expected [row, query_head, query, head_dim] and [row, kv_head, token, head_dim]."
        )


def _check_array(name: str, array: AnyNumpy, dtype: np.dtype[Any], rank: int) -> None:
    if array.dtype != dtype or array.ndim != rank:
        raise CompactionError(
            f"`{name}` of the trace is {array.dtype}{list(array.shape)}; expected {dtype} of "
            f"{rank} {'axis' if rank == 1 else 'axes'}."
        )


def _check_ascending(name: str, values: Int32[np.ndarray, " value"], bound: int) -> None:
    is_ascending = (np.diff(values) > 0).all()
    if not is_ascending or values[0] < 0 or values[-1] >= bound:
        raise CompactionError(
            f"`{name}` of the trace is {values[:8].tolist()}…; expected ascending values in "
            f"0 … {bound - 1}."
        )


def _check_finite(name: str, array: AnyNumpy, trace: AttentionTrace, positions: AnyNumpy) -> None:
    for row, layer in enumerate(trace.layers):
        is_faulty = ~np.isfinite(array[row].astype(np.float32)).all(axis=(0, 2))
        if is_faulty.any():
            position = int(positions[int(np.flatnonzero(is_faulty)[0])])
            raise CompactionError(
                f"`{name}` of the trace holds a number that is not finite in layer {layer} at "
                f"token position {position}; record it again."
            )
