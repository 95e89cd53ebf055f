"""Real processes for tests that kill them: a leader node, a consumer that records what it was given."""
