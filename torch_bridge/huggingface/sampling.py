"""From logits to tokens: greedy, or seeded sampling at a temperature."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32
from transformers import LogitsProcessorList


class Sampler:
    """Draws tokens; all randomness of a run comes from its one seeded generator.

    Attributes:
        temperature: 0 for greedy decoding, else the softmax temperature.
        uniforms: the generator behind every random draw.
    """

    def __init__(self, *, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.uniforms = np.random.default_rng(seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary] whose largest a greedy choice takes."""
        return logits

    def probabilities(self, logits: torch.Tensor) -> Float32[np.ndarray, "*tokens vocabulary"]:
        """Softmax of logits [..., vocabulary] at the temperature, in float32."""
        return (logits.float() / self.temperature).softmax(-1).numpy()

    def draw(self, probabilities: Float32[np.ndarray, " vocabulary"]) -> int:
        """Draws one token by inverting the cumulative distribution."""
        cumulative = np.cumsum(probabilities, dtype=np.float64)
        threshold = self.uniforms.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, threshold, side="right"))

    def choose(self, logits: torch.Tensor) -> int:
        """Chooses the next token from logits [vocabulary]."""
        if self.is_greedy:
            return int(self.processed(logits).argmax())
        return self.draw(self.probabilities(logits))


class ProcessedSampler(Sampler):
    """Chooses from logits as transformers' own processors leave them.

    Only processors that look at one token's logits, and not at the tokens before, fit.
    """

    def __init__(
        self, processors: LogitsProcessorList, *, seed: int, is_greedy: bool = False
    ) -> None:
        super().__init__(temperature=0 if is_greedy else 1, seed=seed)
        self._processors = processors

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """The processed logits [..., vocabulary], in float32."""
        rows = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
        no_tokens = torch.empty(rows.shape[0], 0, dtype=torch.long)
        return self._processors(no_tokens, rows).reshape(logits.shape)  # type: ignore[arg-type]

    def probabilities(self, logits: torch.Tensor) -> Float32[np.ndarray, "*tokens vocabulary"]:
        """Softmax of the processed logits [..., vocabulary], in float32."""
        return self.processed(logits).softmax(-1).numpy()
