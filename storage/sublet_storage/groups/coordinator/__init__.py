"""The writes of a leader: its term, who holds which stream, and up to which position.

Every write is conditional twice: on the leader's term and, change by change, on the grant id.
"""
