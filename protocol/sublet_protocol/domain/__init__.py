"""The domain's vocabulary: topics, filters, subscriptions, epochs, and every public error.

A value of these types that exists is valid: what users write is checked where it comes in, and refused with the value,
the rule and a hint.
"""
