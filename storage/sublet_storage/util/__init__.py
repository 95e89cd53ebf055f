"""Helpers without a word of the domain and without SQL: retries, threads, forks, rare log lines."""
