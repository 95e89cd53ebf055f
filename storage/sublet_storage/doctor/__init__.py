"""Checks of a database, each with what is wrong and the remedy: `sublet doctor`."""
