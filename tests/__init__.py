"""The tests, by kind. `kit` has what they share."""
