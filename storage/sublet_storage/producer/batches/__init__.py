"""Users' values checked, turned into Arrow, routed to streams and cut into blocks."""
