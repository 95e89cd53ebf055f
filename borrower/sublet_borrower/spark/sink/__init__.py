"""Writing DataFrames to topics: staged by tasks, published by the driver."""
