"""Which place of a host ledger's state each request has, by its whole ID."""

# pyright: reportUnknownMemberType=false

import numpy as np

from blockcompact_jax.errors import CompactionError, ResultCode

from .handles import LedgerError, RequestRevisions
from .kinds import RequestState
from .state import LedgerState


class RequestPlaces:
    """Places by request ID; a request that ended keeps its own until another needs it."""

    def __init__(self, max_requests: int) -> None:
        """Starts empty."""
        self._max_requests = max_requests
        self._place_by_request: dict[str, int] = {}

    def find(self, request_id: str) -> int | None:
        """Returns the place of a request; None if it is unknown or forgotten."""
        return self._place_by_request.get(request_id)

    def put(self, request_id: str, place: int) -> None:
        """Remembers the place of a request."""
        self._place_by_request[request_id] = place

    def free(self, state: LedgerState) -> int:
        """Returns a place that was never used, or whose request ended and holds nothing.

        Raises:
            CompactionError: There is none.
        """
        used = set(self._place_by_request.values())
        for place in range(self._max_requests):
            if place not in used:
                return place
        # An operation that still drains holds a slot, so slots tell all.
        holders = np.asarray(state.slots.request[0])
        ended = (RequestState.FINISHED, RequestState.ABSENT)
        for request_id, place in self._place_by_request.items():
            is_ended = int(state.requests.state[0, place]) in ended
            if is_ended and not (holders == place).any():
                del self._place_by_request[request_id]
                return place
        raise CompactionError(
            f"All {self._max_requests} places for requests are taken. Create the ledger with "
            "more, or finish requests and let their slots become quiet."
        )

    def of_epoch(self, request_id: str, request_epoch: int, state: LedgerState) -> int:
        """Returns the place of a request; of a forgotten one, a place with a newer epoch.

        Raises:
            LedgerError: The epoch is of the future.
            CompactionError: The request is not known.
        """
        place = self._place_by_request.get(request_id)
        if place is not None:
            return place
        if request_epoch >= int(state.next_request_epoch[0]):
            raise LedgerError(ResultCode.EPOCH_FUTURE, request_epoch)
        newest = int(np.argmax(state.requests.request_epoch[0]))
        if int(state.requests.request_epoch[0, newest]) > request_epoch:
            return newest
        raise _unknown(request_id)

    def revisions(self, request_id: str, state: LedgerState) -> RequestRevisions:
        """Returns what a request has published.

        Raises:
            CompactionError: It is not known.
        """
        place = self._place_by_request.get(request_id)
        if place is None:
            raise _unknown(request_id)
        requests = state.requests
        return RequestRevisions(
            request_epoch=int(requests.request_epoch[0, place]),
            pool_generation=int(requests.pool_generation[0, place]),
            map_revision=int(requests.map_revision[0, place]),
            selection_revision=int(requests.selection_revision[0, place]),
        )


def _unknown(request_id: str) -> CompactionError:
    return CompactionError(f"`request_id` {request_id!r} is not known; admit it first.")
