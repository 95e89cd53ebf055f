"""Transactions of ours against each other, statement by statement, in every order that Postgres permits."""
