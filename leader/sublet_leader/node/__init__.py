"""One node: the machine that passes events to the leaders of many groups, and the thread that writes for them."""
