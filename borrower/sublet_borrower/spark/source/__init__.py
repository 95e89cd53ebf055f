"""Reading into a DataFrame: streaming micro-batches, and batch replays."""
