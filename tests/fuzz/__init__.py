"""Mutated bytes against the product's decoders, in processes of their own: a signal is a failure (see `__main__`)."""
