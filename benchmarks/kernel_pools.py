"""Pools of one model geometry, and the turns of our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from blockcompact_jax import kernels
from blockcompact_jax.kernels import Layout, PlainStrides, RegisteredPool

BF16 = np.dtype(ml_dtypes.bfloat16)


def aligned(shape: tuple[int, ...], dtype: Any = np.uint16) -> np.ndarray:
    """Ones on a page boundary, as engines have their pools; numpy's own arrays start anywhere."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.ones(num_bytes + 4096, np.uint8)
    first = -memory.ctypes.data % 4096
    array = memory[first : first + num_bytes].view(dtype).reshape(shape)
    array[...] = 1
    return array


@dataclass(frozen=True)
class Geometry:
    model: str
    heads: int
    group: int
    dims: int
    tokens: int

    @property
    def layout(self) -> Layout:
        return Layout.AMX if self.tokens % 32 == 0 else Layout.VEC

    @property
    def name(self) -> str:
        return f"{self.model} {self.heads}x{self.dims} B={self.tokens} {self.layout.label}"

    @property
    def block_bytes(self) -> int:
        return 2 * self.heads * self.tokens * self.dims * 2


MODELS = (("SmolLM2", 3, 3, 64), ("Llama-3-8B", 8, 4, 128), ("Gemma", 1, 4, 256))
GEOMETRIES = tuple(Geometry(*model, tokens) for model in MODELS for tokens in (16, 32, 64))


class Bench:
    """Pools of one geometry, and the blocks of each turn."""

    def __init__(self, geometry: Geometry, pool_bytes: int, turn_bytes: int) -> None:
        self.geometry = geometry
        g = geometry
        self.rng = np.random.default_rng(0)
        self.per_turn = max(2, turn_bytes // g.block_bytes // 2 * 2)
        self.num_blocks = max(pool_bytes // g.block_bytes // self.per_turn, 2) * self.per_turn
        self.plain = aligned((self.num_blocks, 2, g.heads, g.tokens, g.dims))
        noise = self.rng.standard_normal(1 << 20, np.float32).astype(BF16).view(np.uint16)
        self.plain.reshape(-1)[:] = np.resize(noise, self.plain.size)
        self.packed = aligned((self.num_blocks, g.heads, 2 * g.tokens, g.dims))
        self.pools = self._register()
        self.pack_all()
        self.order = self.rng.permutation(self.num_blocks).astype(np.int32)
        self.targets = self.rng.permutation(self.num_blocks).astype(np.int32)

    def _register(self) -> dict[str, RegisteredPool]:
        g = self.geometry
        head = g.tokens * g.dims
        common = {
            "num_layers": 1,
            "num_blocks": self.num_blocks,
            "num_kv_heads": g.heads,
            "block_tokens": g.tokens,
            "head_dim": g.dims,
            "element_bytes": 2,
            "size_bytes": self.plain.nbytes,
        }
        strides = PlainStrides(
            layer=0, kv=g.heads * head, block=2 * g.heads * head, head=head, token=g.dims
        )
        plain = RegisteredPool.register_plain(
            self.plain.ctypes.data, strides=strides, keepalive=self.plain, **common
        )
        packed = RegisteredPool.register_packed(
            self.packed.ctypes.data, layout=g.layout, keepalive=self.packed, **common
        )
        return {"plain": plain, "packed": packed}

    def pack_all(self) -> None:
        """Makes the packed pool hold what the plain one holds."""
        everything = np.arange(self.num_blocks, dtype=np.int32)
        self._pack(everything, everything)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()

    def rows(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        first = turn * self.per_turn % self.num_blocks
        return self.order[first:][: self.per_turn], self.targets[first:][: self.per_turn]

    def _ords(self, *names: str) -> list[Any]:
        return [self.pools[name].current_ord() for name in names]

    def _pack(self, source: np.ndarray, target: np.ndarray) -> None:
        pools = {"plain_pool": self.pools["plain"], "packed_pool": self.pools["packed"]}
        ords = self._ords("plain", "packed")
        kernels.raise_for_status(kernels.host_pool_pack(*ords, 0, source, target, **pools).status)

    def upload(self, turn: int) -> np.ndarray:
        source, target = self.rows(turn)
        pools = {"plain_pool": self.pools["plain"], "packed_pool": self.pools["packed"]}
        ords = self._ords("packed", "plain")
        kernels.host_pool_upload(*ords, 0, source, target, **pools)
        return self.plain

    def pack(self, turn: int) -> np.ndarray:
        self._pack(*self.rows(turn))
        return self.packed

    def move(self, turn: int) -> np.ndarray:
        kernels.host_pool_block_move(
            *self._ords("plain"), 0, *self.halves(turn), pool=self.pools["plain"]
        )
        return self.plain

    def halves(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        source, _ = self.rows(turn)
        return source[: self.per_turn // 2], source[self.per_turn // 2 :]

    def gather(self, turn: int, out: np.ndarray) -> np.ndarray:
        kernels.host_pool_gather(
            *self._ords("plain"),
            0,
            self.rows(turn)[0],
            pool=self.pools["plain"],
            dtype=np.uint16,
            out=out,
        )
        return out
