"""Measurements: ratios side by side in one run, against the limits of the machine and against peers."""
