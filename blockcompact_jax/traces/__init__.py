"""Recorded queries and keys of a model, and what a selection keeps of their attention."""
