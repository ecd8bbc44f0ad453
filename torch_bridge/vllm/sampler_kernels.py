"""A kernel of vLLM's rejection sampler that its CPU build does not have right.

vLLM 0.32 on CPUs verifies drafts of sampled requests with temperatures, top-k and top-p that were
never written: its version of `expand_kernel` fills a copy
(https://github.com/vllm-project/vllm/issues/55005). vLLM lets anyone register another version.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(  # noqa: PLR0917  # as vLLM calls it
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: int | None = None,
) -> None:
    """Writes each request's value once for each of its tokens.

    Args:
        output: [tokens], written.
        values: [batch], of the same dtype.
        cu_num_tokens: [batch], tokens of each request and of those before it.
        replace_from: a value that is replaced.
        replace_to: what replaces it.
        max_num_tokens: most tokens of a request; not used.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts, output_size=output.numel()))


def register() -> None:
    """Registers the kernel with vLLM; each new worker of vLLM registers its own again."""
    from vllm.platforms import current_platform
    from vllm.triton_utils.dispatcher import register_kernels

    if current_platform.is_cpu():
        register_kernels({_KERNEL: expand})
