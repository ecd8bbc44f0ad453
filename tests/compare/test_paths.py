"""One selection on two paths each, over real pools: bytes compared with `compare_kv`."""

import numpy as np
import pytest

from blockcompact_jax.compare import compare_kv
from blockcompact_jax.errors import raise_for_result
from blockcompact_jax.geometry import ModelGeometry, OwnershipGranularity, TableSupport
from blockcompact_jax.kernels import (
    Layout,
    PlainStrides,
    RegisteredPool,
    host_pool_block_move,
    host_pool_upload,
    raise_for_status,
)
from blockcompact_jax.ownership import empty_ownership
from blockcompact_jax.residency import empty_residency
from blockcompact_jax.retention import RetentionKind, RetentionPolicy
from blockcompact_jax.selection import SelectionPolicy
from blockcompact_jax.step import StepPolicy, commit_step, plan_step

ROWS, HEADS, TOKENS, DIM = 3, 2, 32, 32
NUM_SOURCE, NUM_AREA, NUM_PHYSICAL = 16, 12, 24
GEOMETRY = ModelGeometry.uniform(
    num_layers=4,
    num_query_heads=4,
    num_kv_heads=HEADS,
    head_dim=DIM,
    block_tokens=TOKENS,
    dtype="bfloat16",
    layout="amx",
    window_by_layer=[None, 64, None, None],
)


class World:
    """One request's pools and state, on one transport and one retention path."""

    def __init__(self, source_bytes, *, is_copied, tables):
        self.is_copied = is_copied
        self.store = np.zeros((ROWS, NUM_SOURCE + NUM_AREA, HEADS, 2 * TOKENS, DIM), np.uint16)
        self.store[:, :NUM_SOURCE] = source_bytes
        self.memory = np.zeros((ROWS, NUM_PHYSICAL, 2, HEADS, TOKENS, DIM), np.uint16)
        head = TOKENS * DIM
        shape = {
            "num_layers": ROWS,
            "num_kv_heads": HEADS,
            "block_tokens": TOKENS,
            "head_dim": DIM,
            "element_bytes": 2,
        }
        self.packed = RegisteredPool.register_packed(
            self.store.ctypes.data,
            layout=Layout.AMX,
            num_blocks=NUM_SOURCE + NUM_AREA,
            size_bytes=self.store.nbytes,
            keepalive=self.store,
            **shape,
        )
        self.plain = RegisteredPool.register_plain(
            self.memory.ctypes.data,
            num_blocks=NUM_PHYSICAL,
            size_bytes=self.memory.nbytes,
            keepalive=self.memory,
            strides=PlainStrides(
                layer=NUM_PHYSICAL * 2 * HEADS * head,
                kv=HEADS * head,
                block=2 * HEADS * head,
                head=head,
                token=DIM,
            ),
            **shape,
        )
        self.policy = StepPolicy(
            selection=SelectionPolicy(max_want=6, max_tail=NUM_SOURCE),
            retention=RetentionPolicy(tables=tables),
            max_upload=8,
        )
        self.residency = empty_residency(GEOMETRY, max_slots=14)
        self.ownership = empty_ownership(
            GEOMETRY, granularity=OwnershipGranularity.GROUP, num_physical_blocks=NUM_PHYSICAL
        )

    def step(self, scores):
        static = {"geometry": GEOMETRY, "policy": self.policy}
        plan, reserving = plan_step(
            scores, 14, self.residency, self.ownership, budget_blocks=6, **static
        )
        raise_for_result(plan.result)
        is_used = np.asarray(plan.upload.physical_block) >= 0
        names = ("layer_row", "source_block", "physical_block")
        row, source, physical = (np.asarray(getattr(plan.upload, name))[is_used] for name in names)
        if self.is_copied:
            source = self._copy(row, source)
        moved = host_pool_upload(
            self.packed.current_ord(),
            self.plain.current_ord(),
            row,
            source,
            physical,
            packed_pool=self.packed,
            plain_pool=self.plain,
        )
        raise_for_status(moved.status)
        done = commit_step(plan, self.residency, reserving, **static)
        raise_for_result(done.result)
        self._move(done.retention)
        self.residency, self.ownership = done.residency, done.ownership
        return plan, done

    def _copy(self, row, source):
        """UPL-3, `cpu_copy`: gathers each row's blocks into the area [K, N) first."""
        place = np.zeros_like(source)
        for layer_row in range(ROWS):
            is_row = row == layer_row
            place[is_row] = NUM_SOURCE + np.arange(is_row.sum())
        copied = host_pool_block_move(
            self.packed.current_ord(), row, source, place, pool=self.packed
        )
        raise_for_status(copied.status)
        return place

    def _move(self, retention):
        start, target = (np.asarray(getattr(retention, name)) for name in ("move_from", "move_to"))
        row, slot = np.nonzero(start >= 0)
        if not row.size:
            return
        moved = host_pool_block_move(
            self.plain.current_ord(),
            row.astype(np.int32),
            start[row, slot],
            target[row, slot],
            pool=self.plain,
        )
        raise_for_status(moved.status)

    def attended(self):
        """What attention reads through the tables: [row, 2, head, token, dim], and valid tokens."""
        table = np.maximum(np.asarray(self.residency.physical_by_slot), 0)
        blocks = np.stack([self.memory[row, table[row]] for row in range(ROWS)])
        kv = blocks.transpose(0, 2, 3, 1, 4, 5).reshape(ROWS, 2, HEADS, -1, DIM)
        return kv, np.asarray(self.residency.num_valid) * TOKENS

    def close(self):
        self.packed.close()
        self.plain.close()


@pytest.fixture
def worlds():
    rng = np.random.default_rng(3)
    source = rng.integers(0, 2**16, (ROWS, NUM_SOURCE, HEADS, 2 * TOKENS, DIM), np.uint16)
    made = {
        "remap": World(source, is_copied=False, tables=TableSupport.LAYER),
        "copied": World(source, is_copied=True, tables=TableSupport.LAYER),
        "moved": World(source, is_copied=False, tables=TableSupport.SHARED),
    }
    yield made
    for world in made.values():
        world.close()


def test_both_transports_and_both_retentions_attend_to_the_same_bytes(worlds):
    """CMP-1, RET-6, UPL-3: one selection, two paths each; every layer, head and valid token.

    A shared-table engine takes padding with its uploads, so of it only the kept slots are compared,
    after a selection that is due and drops the padding.
    """
    rng = np.random.default_rng(4)
    kinds = set()
    for _ in range(5):
        scores = rng.random((ROWS, NUM_SOURCE), dtype=np.float32)
        done = {name: world.step(scores)[1] for name, world in worlds.items()}
        kinds |= set(np.asarray(done["moved"].retention.kind).tolist())
        expected, valid = worlds["remap"].attended()
        logical = np.asarray(worlds["remap"].residency.logical_by_slot)
        for name in ("copied", "moved"):
            actual, num_valid = worlds[name].attended()
            other = np.asarray(worlds[name].residency.logical_by_slot)
            order = [sorted(row[row >= 0].tolist()) for row in (*logical, *other)]
            assert order[:ROWS] == order[ROWS:]
            assert num_valid.tolist() == valid.tolist()
            compared = compare_kv(
                _by_block(expected, logical),
                _by_block(actual, other),
                num_valid_tokens=valid,
                layer_by_row=GEOMETRY.layer_by_row.tolist(),
            )
            assert compared.is_equal
            assert compared.num_compared_bytes == int(valid.sum()) * 2 * HEADS * DIM * 2
            if name == "copied":
                assert logical.tolist() == other.tolist()
    assert RetentionKind.BYTE_MOVE in kinds


def _by_block(kv, logical):
    """Slots in the order of their logical blocks, so that two slot orders can be compared."""
    blocks = kv.reshape(ROWS, 2, HEADS, -1, TOKENS, DIM)
    order = np.argsort(np.where(logical < 0, NUM_SOURCE, logical), axis=1, kind="stable")
    return np.stack([blocks[row][:, :, order[row]] for row in range(ROWS)]).reshape(kv.shape)


def test_a_wrong_byte_on_either_path_is_found(worlds):
    """CMP-1: the comparison can fail, and names the layer."""
    scores = np.random.default_rng(5).random((ROWS, NUM_SOURCE), dtype=np.float32)
    for world in worlds.values():
        world.step(scores)
    expected, valid = worlds["remap"].attended()
    block = int(np.asarray(worlds["copied"].residency.physical_by_slot)[1, 0])
    worlds["copied"].memory[1, block, 1, 1, 5, 7] ^= 1
    actual, _ = worlds["copied"].attended()
    found = compare_kv(
        expected,
        actual,
        num_valid_tokens=valid,
        layer_by_row=GEOMETRY.layer_by_row.tolist(),
    )
    assert found.num_differing_bytes == 1
    assert (found.mismatches[0].layer, found.mismatches[0].is_value) == (2, True)
