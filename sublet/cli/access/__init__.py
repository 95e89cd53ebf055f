"""`sublet access`: access rules, and the tokens that authenticate principals."""
