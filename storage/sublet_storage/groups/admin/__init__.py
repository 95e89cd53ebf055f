"""Operations on groups and nodes: reset, pause, clone, drain."""
