"""What a leader writes: its term, and who holds which stream up to which position.

Every write is conditional twice: on the leader's term and, entry by entry, on the grant id.
"""
