"""The ways to keep what is selected, by the names that a user gives them."""

from __future__ import annotations

import enum

from blockcompact_jax.budget import OptionError
from blockcompact_jax.geometry import OwnershipGranularity, TableSupport
from blockcompact_jax.retention import RetentionPolicy


class RetentionPath(enum.StrEnum):
    """What an engine's tables allow, and what is done where layers keep different slots.

    SHARED_TABLE: the layers of a group select together, by the mean of their scores, so that one
    table serves them all. LAYER_TABLES: one table a layer. BYTE_MOVE: one table, and bytes move to
    where it points. UNION: one table of all slots that any layer wants; never "same attention".
    """

    SHARED_TABLE = "shared_table"
    LAYER_TABLES = "layer_tables"
    BYTE_MOVE = "byte_move"
    UNION = "union"

    @property
    def has_shared_table(self) -> bool:
        """Whether one table serves all layers of a group."""
        return self is not RetentionPath.LAYER_TABLES

    @property
    def policy(self) -> RetentionPolicy:
        """The policy of `plan_retention`."""
        tables = TableSupport.SHARED if self.has_shared_table else TableSupport.LAYER
        return RetentionPolicy(tables=tables, allow_union=self is RetentionPath.UNION)


def check_path(retention: RetentionPath, ownership: OwnershipGranularity) -> None:
    """Refuses a combination that does not exist.

    Raises:
        OptionError: if one table is to name blocks that each layer owns by itself.
    """
    if retention.has_shared_table and ownership is OwnershipGranularity.LAYER:
        raise OptionError(
            f"`ownership` is 'layer' with `retention` '{retention}', expected 'group': one table "
            "for all layers names blocks that span them"
        )
