"""`sublet groups`: list, describe, reset, pause, clone, watch and more."""
