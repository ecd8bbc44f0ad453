"""Hugging Face transformers engine."""
