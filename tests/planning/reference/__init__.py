"""Brute-force twins of the planning stages. They import nothing of the code under test."""
