"""The checks of `sublet doctor`: what is wrong with a database, and what to do."""
