"""Many configurations of one job: which, what each gave, and how two sweeps differ."""
