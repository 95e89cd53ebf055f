"""Reading into DataFrames: streaming micro-batches, and batch replays."""
