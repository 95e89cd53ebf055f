"""Helpers without domain and SQL: retries, threads, forks, throttled logging."""
