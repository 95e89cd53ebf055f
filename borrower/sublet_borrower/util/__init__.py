"""Helpers of a consumer's process: its event loop, threads, locks and clock."""
