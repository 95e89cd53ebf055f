"""Helpers of a consumer's process: event loop, threads, locks and clock."""
