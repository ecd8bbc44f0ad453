"""Requests recognised by their blocks, against a model that knows their names."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_bridge.vllm.requests import DecodingRequest, RequestTracker, RetainedRequests

NUM_BLOCKS = 12


@dataclasses.dataclass
class Named:
    """A request of the model: its name is its identity, and it is all that the engine knows."""

    name: int
    num_prompt: int
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0  # tokens that a resumed request must compute again count as not computed


class Scheduler:
    """Admits, chunks, grows, preempts and finishes as drawn; reuses blocks at once."""

    def __init__(self, block_tokens):
        self.block_tokens = block_tokens
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.running, self.waiting, self.num_names = [], [], 0

    def release(self, request):
        self.free.extend(request.blocks)  # a stack: the next request gets these very blocks
        request.blocks, request.num_computed = [], 0
        self.running.remove(request)

    def grow(self, request, num_tokens):
        """Whether the blocks for `num_tokens` could be had."""
        missing = -(-num_tokens // self.block_tokens) - len(request.blocks)
        if missing > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(missing)]
        return True

    def step(self, draw):
        """Rows (request, length, is_decoding) of one step."""
        if self.waiting and draw(st.booleans()):
            self.running.append(self.waiting.pop())
        elif len(self.running) < 4 and draw(st.booleans()):
            self.num_names += 1
            self.running.append(Named(self.num_names, draw(st.integers(1, 3 * self.block_tokens))))
        for request in list(self.running):
            event = draw(st.sampled_from(["", "", "", "", "", "finish", "preempt"]))
            if event:
                self.release(request)
            if event == "preempt":
                self.waiting.append(request)
        rows = []
        for request in draw(st.permutations(self.running)):
            if draw(st.integers(0, 9)) == 0:
                continue  # not scheduled in this step
            target = max(request.num_prompt, request.num_tokens)
            is_prefilling = request.num_computed < target
            left = target - request.num_computed
            chunk = draw(st.sampled_from([1, left])) if is_prefilling else 1
            if self.grow(request, request.num_computed + chunk):
                request.num_computed += chunk
                request.num_tokens = max(request.num_tokens, request.num_computed)
                rows.append((request, request.num_computed, not is_prefilling))
        return rows


@given(data=st.data(), block_tokens=st.sampled_from([1, 2, 4]), num_steps=st.integers(1, 25))
def test_a_row_is_the_same_request_exactly_if_it_decoded_in_the_step_before(
    data, block_tokens, num_steps
):
    scheduler, tracker = Scheduler(block_tokens), RequestTracker(block_tokens)
    before, ever = {}, []
    for _ in range(num_steps):
        rows = scheduler.step(data.draw)
        table = np.full((len(rows), NUM_BLOCKS + 1), -7, np.int32)
        for place, (request, _, _) in enumerate(rows):
            table[place, : len(request.blocks)] = request.blocks
        lengths = np.array([length for _, length, _ in rows], np.int32)
        decodes = np.array([is_decoding for _, _, is_decoding in rows], bool)

        found = tracker.step(table, lengths, decodes)
        table[:] = -9  # engines reuse their buffers

        now = {}
        for (request, length, is_decoding), state in zip(rows, found, strict=True):
            if not is_decoding:
                assert state is None
                continue
            assert state.num_tokens == length
            assert state.physical_blocks.tolist() == request.blocks
            if request.name in before:
                assert state is before[request.name]
            else:
                assert all(state is not other for other in ever)
            now[request.name] = state
            ever.append(state)
        before = now


def test_another_request_in_the_blocks_of_one_that_left_starts_anew():
    tracker = RequestTracker(2)
    decodes = np.ones(1, bool)
    (first,) = tracker.step(np.array([[5, 6]], np.int32), np.array([3], np.int32), decodes)
    assert tracker.step(np.zeros((0, 2), np.int32), np.zeros(0, np.int32), decodes[:0]) == []
    (second,) = tracker.step(np.array([[5, 6]], np.int32), np.array([4], np.int32), decodes)
    assert second is not first


def test_a_changed_earlier_block_is_another_request():
    tracker = RequestTracker(2)
    decodes = np.ones(1, bool)
    (first,) = tracker.step(np.array([[5, 6]], np.int32), np.array([3], np.int32), decodes)
    (second,) = tracker.step(np.array([[4, 6]], np.int32), np.array([4], np.int32), decodes)
    assert second is not first


def test_a_length_that_did_not_grow_by_one_is_another_request():
    tracker = RequestTracker(2)
    decodes, table = np.ones(1, bool), np.array([[5, 6]], np.int32)
    (first,) = tracker.step(table, np.array([3], np.int32), decodes)
    (second,) = tracker.step(table, np.array([3], np.int32), decodes)
    assert second is not first


def test_a_padded_row_of_no_tokens_is_no_request():
    tracker = RequestTracker(2)
    rows = tracker.step(
        np.array([[5, 6], [0, 0]], np.int32), np.array([3, 0], np.int32), np.array([True, False])
    )
    assert rows[1] is None
    assert rows[0].physical_blocks.tolist() == [5, 6]


def decoding_step(tracker, blocks, num_tokens):
    """The request of a step with one decoding row."""
    (request,) = tracker.step(
        np.array([blocks], np.int32), np.array([num_tokens], np.int32), np.array([True])
    )
    return request


def test_OWN_1_a_request_that_gave_blocks_back_is_known_until_its_owner_frees_it():
    """OWN-1: also after steps that it was not scheduled in; its lost blocks are never read."""
    retained = RetainedRequests()
    tracker = RequestTracker(2, retained)
    request = decoding_step(tracker, [5, 6, 7, 8], 7)
    assert retained.dropped_blocks(5) == []
    request.selected, request.num_candidate_blocks = np.array([[0]], np.int32), 2
    request.is_retained = True
    assert retained.dropped_blocks(5) == [], "nothing is dropped before a step without it begins"
    assert decoding_step(tracker, [5, 6, 7, 8], 8) is request
    assert request.own_blocks().tolist() == [0, 2, 3]
    assert retained.dropped_blocks(5) == [1]
    other = decoding_step(tracker, [6, 9], 3)  # in the block that was given back
    assert other is not request
    assert decoding_step(tracker, [5, 6, 7, 8, 3], 9) is request
    assert request.own_blocks().tolist() == [0, 2, 3, 4]
    retained.forget(5)
    assert decoding_step(tracker, [5, 6, 7, 8, 3], 9) is not request


def test_OWN_1_a_later_prompt_of_a_request_that_gave_blocks_back_finds_it():
    """OWN-1: a session goes on with several tokens, and null blocks where it gave blocks back."""
    retained = RetainedRequests()
    tracker = RequestTracker(2, retained)
    request = decoding_step(tracker, [5, 6, 7, 8], 7)
    request.selected, request.num_candidate_blocks = np.array([[0]], np.int32), 2
    request.is_retained = True
    decoding_step(tracker, [5, 6, 7, 8], 8)

    def chunk(blocks, num_tokens):
        (found,) = tracker.step(
            np.array([blocks], np.int32), np.array([num_tokens], np.int32), np.array([False])
        )
        return found

    assert chunk([9, 1, 2, 3, 4, 6], 12) is None, "another request's prompt"
    assert chunk([5, 0, 7, 8, 3, 4], 12) is request
    assert request.own_blocks().tolist() == [0, 2, 3, 4, 5]
    assert retained.dropped_blocks(5) == [1]
    assert chunk([5, 0, 7, 8, 3, 4, 9], 13) is request, "a chunk of one token"
    assert decoding_step(tracker, [5, 0, 7, 8, 3, 4, 9], 14) is request
    for lost in ([5, 0, 7, 8, 3, 4, 1], [5, 0, 0, 8, 3, 4, 9]):
        with pytest.raises(RuntimeError, match="its KV is lost"):
            chunk([*lost, 2], 16)
    with pytest.raises(RuntimeError, match="now has 10 tokens"):
        chunk([5, 0, 7, 8, 3], 10)


def test_OWN_5_a_request_whose_blocks_changed_behind_the_policy_is_an_error():
    """OWN-5: its KV is lost; anything else would be silent garbage."""
    retained = RetainedRequests()
    lost = DecodingRequest(
        physical_blocks=np.array([5, 6], np.int32),
        num_tokens=4,
        selected=np.array([[0]], np.int32),
        is_retained=True,
    )
    retained.add(lost)
    tracker = RequestTracker(2, retained)
    with pytest.raises(RuntimeError, match="physical block 5 gave blocks back at 4 tokens"):
        decoding_step(tracker, [5, 7], 4)
    with pytest.raises(RuntimeError, match="now has 5 tokens and other blocks"):
        decoding_step(tracker, [5, 7, 8], 5)


@pytest.mark.parametrize("gained", [1, 3, 6])
def test_a_request_that_gained_several_tokens_is_known_at_exactly_its_new_length(gained):
    """As after a step that verified drafts; its table may already name blocks for the next."""
    table, is_decoding = np.array([[7, 3, 9, 5]], np.int32), np.array([True])
    for length in range(5, 13):
        tracker = RequestTracker(4)
        (request,) = tracker.step(table, np.array([5], np.int32), is_decoding)
        request.next_num_tokens = 5 + gained
        (found,) = tracker.step(table, np.array([length], np.int32), is_decoding)
        assert (found is request) == (length == 5 + gained)
