"""The CPU verifier as a process of its own: HTTP for messages, shared memory for bytes."""
