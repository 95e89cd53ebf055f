"""A seeded world of nodes, agents and an in-memory store, joined by a network that loses, delays and repeats.

One seed is one run: a safety phase, in which things crash, then a liveness phase, in which nothing does and everything
must come to rest. The machines and the store's rules are the product's own; the checkers are not. `SEED=n pytest
tests/simulation` repeats one run with its trace; `python -m tests.simulation --seeds 20000` runs many.
"""
