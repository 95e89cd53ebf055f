"""What an operator changes of a group or a node: reset, pause, clone, drain."""
