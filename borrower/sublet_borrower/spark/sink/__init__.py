"""Writing a DataFrame to topics: staged by tasks, published by the driver."""
