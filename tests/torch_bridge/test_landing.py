"""A selection of several ranks: tables name new blocks only once every rank has their bytes."""

import numpy as np
import pytest
from test_session import make_session

from blockcompact_jax.errors import ResultCode
from blockcompact_jax.ledger import LedgerError
from blockcompact_jax.ledger_transfers import LedgerTransfers
from blockcompact_jax.transfer import Pools, move_rows
from torch_bridge.huggingface.policies import score_source


def test_COM_7_tables_stay_where_a_rank_has_not_landed(llama, token_ids):
    """COM-7: rank 1 says nothing; refused by its name; the tables are the old ones."""
    ranks = [0, 1]
    with make_session(llama) as session:
        pools = Pools(packed=session.full.packed_pool, resident=session.resident.pool)
        transfers = LedgerTransfers("request", num_ranks=2)

        def move(rows):
            move_rows(pools, rows)
            for rank in ranks:
                transfers.landed(rank, transfers.open_key)

        session.runtime.attach(pools, transfers.transaction, move)
        session.prefill(token_ids[:200])
        session.score_source = score_source("random", seed=11)
        runtime, tables = session.runtime, session.resident.tables
        residency, revision = runtime.residency, tables.revision
        entries = tables.physical_blocks.copy()
        ranks.pop()
        with pytest.raises(LedgerError) as caught:
            session.reselect()
        assert (caught.value.code, caught.value.value) == (ResultCode.MISSING_READERS, 1)
        assert runtime.residency is residency
        assert (runtime.num_selections, tables.revision) == (1, revision)
        np.testing.assert_array_equal(tables.physical_blocks, entries)
        ranks.append(1)
        session.reselect()
        assert (runtime.num_selections, tables.revision) == (2, revision + 1)
