"""Simulation of the commit ledger: worlds with faults, a second ledger, mutants, exploration."""
