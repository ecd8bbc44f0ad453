"""vLLM on compacted KV, through its plugin and attention-backend interfaces; nothing is patched."""
