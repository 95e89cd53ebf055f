"""What tests of several kinds use."""
