"""Choosing and preparing the database: the given one or an embedded one, and its migrations."""
