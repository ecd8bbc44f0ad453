"""Tensor-parallel ranks as processes: each moves its own KV heads into its own resident pool."""
