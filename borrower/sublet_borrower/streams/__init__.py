"""The streams granted to a session, its position in each, and the batches made of them."""
