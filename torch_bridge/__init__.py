"""PyTorch side of block-native KV compaction: zero-copy sharing, pools, engines."""
