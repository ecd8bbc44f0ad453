"""A session on tiny models: exact bytes in every store, exact logits at full budget."""

import gc

import numpy as np
import pytest
import torch
from sessions import make_session
from transformers import DynamicCache

from blockcompact_jax.budget import Budget
from blockcompact_jax.kernels import Layout, packed_k_offsets, packed_v_offsets
from torch_bridge.huggingface.baseline import StockPrefix
from torch_bridge.huggingface.cache import CompactedLayer
from torch_bridge.huggingface.layers import UnsupportedModelError
from torch_bridge.huggingface.policies import score_source
from torch_bridge.tables import TablesBusyError


def _stock_logits(model, token_ids, num_context):
    """Logits of a stock prefill and of every later token, one step at a time."""
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        context = torch.tensor([token_ids[:num_context]])
        rows = [model(context, past_key_values=cache, logits_to_keep=1).logits[0, -1]]
        for token in token_ids[num_context:]:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_budget_drafts_are_bitwise_the_stock_model(model, token_ids, dtype):
    """Teacher forcing over selections and block boundaries: every logit equal."""
    typed = model.to(dtype)
    try:
        expected = _stock_logits(typed, token_ids, 130)
        session = make_session(typed, budget=Budget(fraction=1.0), attention="gathered")
        assert torch.equal(session.prefill(token_ids[:130]), expected[0])
        for first in range(130, 260, 2):
            pair = token_ids[first : first + 2]
            drafted = [session.draft_step([pair[0]])[-1]]
            session.draft_step([1, 2, 3])
            session.forget_draft(3)
            drafted.append(session.draft_step([pair[1]])[-1])
            assert torch.equal(torch.stack(drafted), expected[first - 129 : first - 127])
            # Confirming one token at a time keeps the full KV bitwise the stock one, too.
            for place, token in enumerate(pair):
                session.verify([token], is_scored=place == 1)
                session.confirm(1)
            if first % 4 == 0:
                session.reselect()
        session.close()
    finally:
        model.to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [Layout.AMX, Layout.VEC])
def test_full_budget_drafts_are_bitwise_the_verifier(model, token_ids, dtype, layout):
    """In place, too: resident blocks in slot order and packed blocks give every logit alike."""
    typed = model.to(dtype)
    try:
        expected = _stock_logits(typed, token_ids[:200], 130)
        session = make_session(typed, budget=Budget(fraction=1.0), layout=layout)
        assert torch.equal(session.prefill(token_ids[:130]), expected[0])
        for position in range(130, 200):
            drafted = session.draft_step([token_ids[position]])[-1]
            session.draft_step([1, 2])
            verified = session.verify([token_ids[position]], is_scored=True)[-1]
            assert torch.equal(drafted, verified)
            tolerance = 1e-4 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(
                verified, expected[position - 129], rtol=tolerance, atol=tolerance
            )
            session.confirm(1)
            if position % 3 == 0:
                session.reselect()
        session.close()
    finally:
        model.to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_dtypes_that_blocks_are_not_attended_in_are_refused(llama, dtype):
    typed = llama.to(dtype)
    try:
        with pytest.raises(UnsupportedModelError, match="attention='gathered'"):
            make_session(typed)
    finally:
        llama.to(torch.float32)


def test_a_model_that_keeps_keywords_from_attention_is_refused(session, token_ids):
    """Its layers would attend to the newest tokens only."""
    session.prefill(token_ids[:100])
    forward = session.model.forward

    def forward_without_keyword(*args, blockcompact_blocks, **kwargs):
        return forward(*args, **kwargs)

    session.model.forward = forward_without_keyword
    try:
        with pytest.raises(UnsupportedModelError, match="does not hand keywords"):
            session.draft_step([1])
    finally:
        del session.model.forward


def test_a_small_budget_changes_drafts_but_never_verification(model, token_ids):
    expected = _stock_logits(model, token_ids[:200], 190)
    session = make_session(model, budget=Budget(blocks=2), policy="random")
    session.prefill(token_ids[:190])
    drafted = session.draft_step([token_ids[190]])[-1]
    assert not torch.allclose(drafted, expected[1], atol=1e-3)
    verified = session.verify(token_ids[190:194], is_scored=False)
    torch.testing.assert_close(verified, expected[1:5], rtol=1e-4, atol=1e-4)
    session.close()


def _unpack(packed, shape, layout):
    """Places every element of [rows, blocks, heads, 2B, D] by the documented offsets."""
    geometry = {
        "block_tokens": shape.block_tokens,
        "head_dim": shape.head_dim,
        "element_bytes": shape.dtype.itemsize,
    }
    regions = packed.reshape(*packed.shape[:3], 2, -1)
    key = regions[..., 0, :][..., packed_k_offsets(layout, **geometry)]
    value = regions[..., 1, :][..., packed_v_offsets(layout, **geometry)]
    return torch.stack([key, value], dim=2)  # [rows, blocks, kv, heads, B, D]


def _log_writes(session):
    """A plain copy of everything the verifier wrote, [rows, kv, heads, tokens, dim], by itself."""
    full, shape = session.full, session.full.shape
    log = torch.zeros(
        shape.num_rows, 2, shape.num_kv_heads, full.max_tokens, shape.head_dim, dtype=shape.dtype
    )
    prefill, write = full.prefill, full.write

    def logged_write(row, token_position, key, value):
        log[row, :, :, token_position : token_position + key.shape[1]] = torch.stack([key, value])
        write(row, token_position, key, value)

    def logged_prefill(row, key, value):
        log[row, :, :, : key.shape[1]] = torch.stack([key, value])
        prefill(row, key, value)

    full.prefill, full.write = logged_prefill, logged_write
    return log


def _check_stores(session, log):
    """Packed blocks, resident blocks and resident tail hold the verifier's own bytes."""
    shape, size = session.resident.shape, session.limits.block_tokens
    num_blocks = session.num_tokens // size
    plain = _unpack(session.full.packed[:, :num_blocks], shape, session.layout)
    expected = log[..., : num_blocks * size, :].unflatten(3, (num_blocks, size))
    assert torch.equal(plain, expected.permute(0, 3, 1, 2, 4, 5))
    residency = session.runtime.residency
    for row in range(shape.num_rows):
        count = int(residency.num_valid[row])
        logical = np.asarray(residency.logical_by_slot)[row, :count]
        tokens = [token for block in logical for token in range(block * size, (block + 1) * size)]
        tail_start = session.runtime.num_candidate_blocks * size
        tokens += range(tail_start, session.num_tokens)
        held = torch.stack(session.resident.read(row, session.num_tokens))
        assert torch.equal(held, log[row][:, :, tokens])
        full = torch.stack(session.full.read(row, session.num_tokens))
        assert torch.equal(full, log[row, :, :, : session.num_tokens])


@pytest.mark.parametrize(
    ("block_tokens", "layout"),
    [(32, Layout.AMX), (32, Layout.VEC), (8, Layout.VEC), (1, Layout.VEC)],
)
def test_every_store_holds_the_verifiers_own_bytes(model, token_ids, block_tokens, layout):
    """UPL-6, RET-8: exact bytes through rounds of rejection, graduation, upload and retention."""
    session = make_session(model, block_tokens=block_tokens, layout=layout, policy="random")
    log = _log_writes(session)
    session.prefill(token_ids[:150])
    _check_stores(session, log)
    position = 150
    for number in range(8):
        for token in token_ids[position : position + 3]:
            session.draft_step([token])
        is_scored = number % 2 == 1
        session.verify(token_ids[position : position + 4], is_scored=is_scored)
        num_confirmed = 1 + number % 4
        session.confirm(num_confirmed)
        position += num_confirmed
        assert session.num_tokens == session.cache.get_seq_length() == position
        _check_stores(session, log)
        if is_scored:
            session.reselect()
            _check_stores(session, log)
    assert session.runtime.metrics.h2d_bytes > 0
    session.close()


def test_booked_costs_are_what_moved(session, token_ids):
    """MET-1, MET-2: no CPU gather and no resident move, and yet bytes are uploaded."""
    session.prefill(token_ids[:200])
    metrics = session.runtime.metrics
    num_held = int(np.asarray(session.runtime.residency.num_valid).sum())
    assert metrics.h2d_bytes == num_held * session.resident.shape.block_bytes > 0
    assert metrics.cpu_gather_bytes == metrics.cpu_destination_blocks == 0
    assert metrics.resident_move_bytes == metrics.physical_blocks_released == 0
    assert metrics.metadata_us is None


def test_unchanged_selection_uploads_nothing_and_is_still_published(model, token_ids):
    """DIF-6, COM-2: want = held sends no byte, copies no list and is a selection all the same."""
    session = make_session(model, policy="recency")
    session.prefill(token_ids[:200])
    before, state = session.runtime.metrics, session.runtime._state
    session.reselect()
    after = session.runtime._state
    assert after.residency.logical_by_slot is state.residency.logical_by_slot
    assert after.residency.physical_by_slot is state.residency.physical_by_slot
    assert after.ownership is state.ownership
    assert session.runtime.num_selections == 2
    assert session.runtime.metrics.h2d_bytes == before.h2d_bytes
    assert int(session.runtime.residency.revisions.selection_revision) == 2
    assert int(session.runtime.residency.revisions.pool_generation) == 1
    session.close()


def test_a_refused_selection_changes_nothing(session, token_ids):
    """SEL-4: a NaN score is refused by layer and block; tables and bytes stay."""
    session.prefill(token_ids[:200])
    before = session.resident.tensor.clone()
    residency = session.runtime.residency
    session.blocks.mass[1, 0, 0, 3] = torch.nan
    layer = session.geometry.full_layers[1]
    with pytest.raises(ValueError, match=f"logical block 3 in layer {layer} is NaN"):
        session.reselect()
    assert session.runtime.residency is residency
    assert torch.equal(session.resident.tensor, before)
    assert session.runtime.num_selections == 1


def test_OWN_3_tables_that_are_read_refuse_a_selection_and_nothing_changes(session, token_ids):
    """OWN-3: the runtime frees no block that a table still names; later the selection succeeds."""
    session.prefill(token_ids[:200])
    session.score_source = score_source("random", seed=11)
    runtime, resident = session.runtime, session.resident
    state, metrics = runtime._state, runtime.metrics
    held = {row: resident.read(row, 200)[0].clone() for row in range(resident.shape.num_rows)}
    entries, revision = resident.tables.physical_blocks.copy(), resident.tables.revision
    with resident.tables.reading():
        for _ in range(2):
            with pytest.raises(TablesBusyError):
                session.reselect()
    assert runtime._state is state
    assert runtime.metrics == metrics
    assert runtime.num_selections == 1
    assert resident.tables.revision == revision
    np.testing.assert_array_equal(resident.tables.physical_blocks, entries)
    assert all(torch.equal(resident.read(row, 200)[0], held[row]) for row in held)
    session.reselect()
    assert runtime.num_selections == 2
    assert resident.tables.revision == revision + 1
    written = runtime.metrics.table_entries_written - metrics.table_entries_written
    assert written == resident.tables.num_entries.sum()


def test_closing_twice_gives_the_attention_back_once(llama):
    """A second `close` must not take away what another session still borrows, then or later."""
    other = make_session(llama)
    session = make_session(llama)
    session.close()
    session.close()
    assert llama.config._attn_implementation == "blockcompact"
    other.close()
    assert llama.config._attn_implementation == "sdpa"
    with make_session(llama):
        assert llama.config._attn_implementation == "blockcompact"
    assert llama.config._attn_implementation == "sdpa"


def test_a_forgotten_session_gives_the_attention_back(llama):
    session = make_session(llama)
    del session
    gc.collect()
    assert llama.config._attn_implementation == "sdpa"


def test_stock_prefix_is_what_a_stock_prefill_leaves(model, token_ids):
    session = make_session(model)
    session.prefill(token_ids[:100])
    prefix = StockPrefix(session.cache)
    session.draft_step([1])
    copied = prefix.to_stock(model.config)
    model.set_attn_implementation("sdpa")
    stock = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([token_ids[:100]]), past_key_values=stock)
    for ours, theirs in zip(copied.layers, stock.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 100
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    session.close()


def test_sliding_layers_stay_stock_and_full_layers_report_the_logical_length(gemma, token_ids):
    session = make_session(gemma, budget=Budget(blocks=2))
    session.prefill(token_ids[:200])
    kinds = [isinstance(layer, CompactedLayer) for layer in session.cache.layers]
    assert kinds == [False, True, False, True]
    assert [layer.get_seq_length() for layer in session.cache.layers] == [200] * 4
    session.close()


def test_full_layers_of_a_hybrid_model_never_see_the_future(gemma, token_ids):
    """A mask sized from a sliding layer's window would leak later tokens into earlier logits."""
    session = make_session(gemma)
    session.prefill(token_ids[:150])
    before = session.verify(token_ids[150:154], is_scored=False)
    changed = [*token_ids[150:153], (token_ids[153] + 1) % 97]
    after = session.verify(changed, is_scored=False)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])
    session.close()
