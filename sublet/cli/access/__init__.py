"""`sublet access`: who may do what at nodes, and the tokens that prove who it is."""
