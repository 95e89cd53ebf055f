"""The machine of one node, which runs the leaders of many groups, and its thread for the database."""
