"""Tests, one folder per kind; shared helpers are in `kit`."""
