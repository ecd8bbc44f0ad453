"""What self-speculation promises in every model; a test module gives the fixtures."""

import engines
from draft_writes import DraftWrites

MAX_TOKENS = 512  # `max_model_len` of the fixtures' engines


class LosslessTests:
    """Of `llm`, which drafts, `stock`, which does not, and `counted`.

    Attributes:
        num_new_until_full: new tokens of six requests with which they no longer fit.
    """

    num_new_until_full = 0

    def test_greedy_tokens_are_stocks_at_the_longest_sequence(self, stock, llm, counted):
        prompts = [engines.prompt(n, seed=3) for n in (MAX_TOKENS - 40, 130)]
        assert engines.generate(llm, prompts, 40) == engines.generate(stock, prompts, 40)
        assert counted()["num_verified"]

    def test_preempted_requests_resume_with_stocks_tokens(self, stock, llm, counted, monkeypatch):
        preempted = engines.record_preemptions(llm, monkeypatch)
        prompts = [engines.prompt(200, seed=seed) for seed in range(6)]
        tokens = engines.generate(llm, prompts, self.num_new_until_full)
        assert preempted
        assert tokens == engines.generate(stock, prompts, self.num_new_until_full)

    def test_drafts_leave_every_byte_of_confirmed_kv_alone(self, llm, counted, monkeypatch):
        """They write in their own request's blocks, behind its confirmed tokens, and nowhere else;
        in windows too."""
        writes = DraftWrites(llm, monkeypatch)
        engines.generate(llm, [engines.prompt(n) for n in (158, 120, 187)], 40)
        assert writes.num_written > 100
        assert writes.num_crossed > 2, "drafts reach into blocks that hold nothing confirmed"
