"""Programs to copy from: each a package with a page of its own, `python -m examples.NAME`. Tests run them."""
