"""Benchmarks: ratios measured in one run, against the limits of the machine and against peers."""
