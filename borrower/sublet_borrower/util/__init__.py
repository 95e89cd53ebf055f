"""Helpers of a consumer's process: event loop, threads, locks, clock and frames."""
