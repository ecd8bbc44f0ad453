"""Static facts of a model's KV cache: layers, groups, block size, dtype, layout.

All types here are frozen and hashable and travel as static arguments of jitted functions. Plan
arrays have one *row* per active full-attention layer, in `ModelGeometry.full_layers` order; a
sliding-window layer has no row.
"""

# pyright: reportUnknownMemberType=false

import enum
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from .errors import CompactionError


class LayerKind(enum.Enum):
    """How a layer attends: to everything, or to a sliding window."""

    FULL = "full"
    SLIDING = "sliding"


class TableSupport(enum.Enum):
    """What block tables an engine can read: one for a whole group, or one per layer."""

    SHARED = "shared"
    LAYER = "layer"


class OwnershipGranularity(enum.Enum):
    """What one physical block ID spans: all layers of a group, or one layer's cell."""

    GROUP = "group"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """One decoder layer.

    Attributes:
        layer: Decoder layer ID.
        kind: Full attention or sliding window.
        num_query_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Key/value heads.
        head_dim: Elements per head.
        window_tokens: Window of a sliding layer, in tokens; None for a full layer.
    """

    layer: int
    kind: LayerKind
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise CompactionError(f"`layer` is {self.layer}; decoder layer IDs start at 0.")
        for name in ("num_query_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise CompactionError(
                    f"`{name}` of layer {self.layer} is {getattr(self, name)}; give at least 1."
                )
        if self.num_query_heads % self.num_kv_heads != 0:
            raise CompactionError(
                f"`num_query_heads` of layer {self.layer} is {self.num_query_heads}, no multiple "
                f"of its {self.num_kv_heads} KV heads; every KV head serves equally many."
            )
        has_window = self.window_tokens is not None
        if has_window != (self.kind is LayerKind.SLIDING):
            raise CompactionError(
                f"`window_tokens` of layer {self.layer} is {self.window_tokens} on a "
                f"{self.kind.value} layer; a sliding layer needs a window, a full one has none."
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise CompactionError(
                f"`window_tokens` of layer {self.layer} is {self.window_tokens}; give at least 1."
            )


@dataclass(frozen=True, kw_only=True)
class GroupGeometry:
    """A KV-cache group: the layers that share one allocation owner.

    Attributes:
        group: Group ID.
        layers: Decoder layer IDs, ascending.
    """

    group: int
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """All static facts of a model's KV cache.

    Attributes:
        layers: The active decoder layers, ascending IDs (a pipeline stage may hold only some).
        groups: A partition of the layers into KV-cache groups.
        block_tokens: Tokens per block.
        dtype: KV element type by name, such as "bfloat16".
        layout: Name of the CPU pool's layout, such as "amx" or "vec".
    """

    layers: tuple[LayerGeometry, ...]
    groups: tuple[GroupGeometry, ...]
    block_tokens: int
    dtype: str
    layout: str

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise CompactionError(f"`block_tokens` is {self.block_tokens}; give at least 1.")
        try:
            jnp.dtype(self.dtype)
        except TypeError as error:
            raise CompactionError(
                f"`dtype` {self.dtype!r} is not an element type; give a name such as 'bfloat16'."
            ) from error
        layer_ids = [layer.layer for layer in self.layers]
        if not layer_ids or layer_ids != sorted(set(layer_ids)):
            raise CompactionError(
                f"`layers` has the IDs {layer_ids}; give at least one layer, ascending, each once."
            )
        group_ids = [group.group for group in self.groups]
        if group_ids != sorted(set(group_ids)):
            raise CompactionError(
                f"`groups` has the IDs {group_ids}; give them ascending, each once."
            )
        grouped = Counter(layer for group in self.groups for layer in group.layers)
        misplaced = sorted(
            layer
            for layer in {*layer_ids, *grouped}
            if grouped[layer] != 1 or layer not in layer_ids
        )
        if misplaced:
            raise CompactionError(
                f"`groups` must hold every layer exactly once; layers {misplaced} are missing, "
                "repeated or unknown."
            )

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        dtype: str,
        layout: str,
        window_by_layer: Sequence[int | None] | None = None,
    ) -> "ModelGeometry":
        """Returns the geometry of a model whose layers differ at most in their window.

        Full layers form group 0 and sliding layers group 1 (or 0 where no layer is full).

        Args:
            num_layers: Decoder layers, IDs 0 … num_layers - 1.
            num_query_heads: Query heads of each layer.
            num_kv_heads: KV heads of each layer.
            head_dim: Elements per head.
            block_tokens: Tokens per block.
            dtype: KV element type by name.
            layout: CPU pool layout by name.
            window_by_layer: Window in tokens per layer, None for full attention. All full if None.
        """
        windows = [None] * num_layers if window_by_layer is None else list(window_by_layer)
        if len(windows) != num_layers:
            raise CompactionError(
                f"`window_by_layer` has {len(windows)} entries for {num_layers} layers; "
                "give one each."
            )
        layers = tuple(
            LayerGeometry(
                layer=layer,
                kind=LayerKind.FULL if window is None else LayerKind.SLIDING,
                num_query_heads=num_query_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                window_tokens=window,
            )
            for layer, window in enumerate(windows)
        )
        members = [
            tuple(layer.layer for layer in layers if layer.kind is kind)
            for kind in (LayerKind.FULL, LayerKind.SLIDING)
        ]
        groups = tuple(
            GroupGeometry(group=group, layers=ids)
            for group, ids in enumerate(ids for ids in members if ids)
        )
        return cls(
            layers=layers, groups=groups, block_tokens=block_tokens, dtype=dtype, layout=layout
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.layers, self.groups, self.block_tokens, self.dtype, self.layout))

    def __hash__(self) -> int:
        # Static arguments are hashed on every dispatch; dozens of layers make that noticeable.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Without the hash: another process hashes enums and strings differently.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Decoder layer IDs of the full-attention layers, ascending: the row → layer map."""
        return tuple(layer.layer for layer in self.layers if layer.kind is LayerKind.FULL)

    @property
    def num_rows(self) -> int:
        """Rows of every plan array: the number of full-attention layers."""
        return len(self.full_layers)

    @cached_property
    def full_groups(self) -> tuple[int, ...]:
        """Group IDs that hold a full-attention layer, ascending: the group axis of plans."""
        full = set(self.full_layers)
        return tuple(group.group for group in self.groups if full.intersection(group.layers))

    @cached_property
    def layer_by_row(self) -> np.ndarray:
        """Decoder layer ID of each row. int32 [row]."""
        return np.asarray(self.full_layers, np.int32)

    @cached_property
    def group_by_row(self) -> np.ndarray:
        """Group ID of each row. int32 [row]."""
        group_by_layer = {layer: g.group for g in self.groups for layer in g.layers}
        return np.asarray([group_by_layer[layer] for layer in self.full_layers], np.int32)

    @cached_property
    def group_place_by_row(self) -> np.ndarray:
        """Place of each row's group in `full_groups`. int32 [row]."""
        places = [self.full_groups.index(int(group)) for group in self.group_by_row]
        return np.asarray(places, np.int32)

    def row_of_layer(self, layer: int) -> int:
        """Returns the row of a full-attention layer.

        Raises:
            CompactionError: If the layer is unknown or a sliding-window layer.
        """
        if layer not in self.full_layers:
            raise CompactionError(
                f"`layer` {layer} has no row; the full-attention layers are {self.full_layers}."
            )
        return self.full_layers.index(layer)

    def layer_geometry(self, layer: int) -> LayerGeometry:
        """Returns the facts of one layer; its window comes from the layer, not from its group."""
        for candidate in self.layers:
            if candidate.layer == layer:
                return candidate
        raise CompactionError(f"`layer` {layer} is not a layer of this model; see `layers`.")

    def num_owners(self, granularity: OwnershipGranularity) -> int:
        """Returns how many allocation owners the full-attention layers have."""
        if granularity is OwnershipGranularity.GROUP:
            return len(self.full_groups)
        return self.num_rows

    def owner_by_row(self, granularity: OwnershipGranularity) -> np.ndarray:
        """Returns the owner of each row: its group's place, or the row itself. int32 [row]."""
        if granularity is OwnershipGranularity.GROUP:
            return self.group_place_by_row
        return np.arange(self.num_rows, dtype=np.int32)

    def layer_by_owner(self, granularity: OwnershipGranularity) -> np.ndarray:
        """Returns the first full-attention layer of each owner. int32 [owner]."""
        owners = self.owner_by_row(granularity)
        first_rows = [
            int(np.flatnonzero(owners == o)[0]) for o in range(self.num_owners(granularity))
        ]
        return self.layer_by_row[np.asarray(first_rows, np.int64)]

    def block_bytes(self, layer: int) -> int:
        """Returns the bytes of one layer's block, keys and values together."""
        facts = self.layer_geometry(layer)
        elements = 2 * self.block_tokens * facts.num_kv_heads * facts.head_dim
        return elements * jnp.dtype(self.dtype).itemsize

    @cached_property
    def layout_hash(self) -> str:
        """SHA-256 of the canonical JSON of all facts: equal on both sides of a handshake."""
        facts = {
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            "layout": self.layout,
            "groups": [[group.group, list(group.layers)] for group in self.groups],
            "layers": [
                [
                    layer.layer,
                    layer.kind.value,
                    layer.num_query_heads,
                    layer.num_kv_heads,
                    layer.head_dim,
                    layer.window_tokens,
                ]
                for layer in self.layers
            ],
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def num_whole_blocks(num_confirmed_tokens: int, block_tokens: int) -> int:
    """Returns how many blocks the confirmed tokens fill completely."""
    if num_confirmed_tokens < 0:
        raise CompactionError(
            f"`num_confirmed_tokens` is {num_confirmed_tokens}; a count is at least 0."
        )
    return num_confirmed_tokens // block_tokens


def num_candidate_blocks(num_confirmed_tokens: int, block_tokens: int, recent_blocks: int) -> int:
    """Returns how many blocks may be selected: whole, confirmed, before the recent tail.

    Args:
        num_confirmed_tokens: Tokens of the sequence without draft tokens.
        block_tokens: Tokens per block.
        recent_blocks: Newest whole blocks that are always resident.
    """
    return max(0, num_whole_blocks(num_confirmed_tokens, block_tokens) - recent_blocks)


def window_blocks(layer: LayerGeometry, num_tokens: int, block_tokens: int) -> range:
    """Returns the logical blocks that the next token's sliding window reads.

    Args:
        layer: A sliding layer; the window is this layer's own, not its group's.
        num_tokens: Tokens in the cache.
        block_tokens: Tokens per block.
    """
    if layer.window_tokens is None:
        raise CompactionError(
            f"`layer` {layer.layer} is a full-attention layer; it has no window. Read all blocks."
        )
    first_token = max(0, num_tokens - layer.window_tokens + 1)
    return range(first_token // block_tokens, -(-num_tokens // block_tokens))


def check_restore_covers(
    restored_blocks: Sequence[int],
    *,
    num_tokens: int,
    num_retained_tokens: int,
    block_tokens: int,
    layer: int,
) -> None:
    """Refuses a restore that does not cover every token the retention kept.

    Args:
        restored_blocks: Logical blocks about to be restored.
        num_tokens: Tokens of the sequence.
        num_retained_tokens: Newest tokens that the retention kept; may exceed a window.
        block_tokens: Tokens per block.
        layer: Decoder layer ID, named in the error.

    Raises:
        CompactionError: If a block with a retained token is missing; restore nothing then.
    """
    first_token = max(0, num_tokens - num_retained_tokens)
    needed = range(first_token // block_tokens, -(-num_tokens // block_tokens))
    missing = sorted(set(needed).difference(restored_blocks))
    if missing:
        raise CompactionError(
            f"`restored_blocks` of layer {layer} lacks blocks {missing}, which hold some of the "
            f"{num_retained_tokens} retained tokens; restore them too, or none at all."
        )
