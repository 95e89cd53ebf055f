"""`sublet nodes`: list, drain and step-down."""
