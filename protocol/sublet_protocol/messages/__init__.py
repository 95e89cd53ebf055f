"""Messages between processes as frozen values, and their codec.

`codec` is the only place that turns messages into wire form and back; what it cannot read is an error that goes to its
sender and disturbs nobody else.
"""
