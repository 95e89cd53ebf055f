"""The network shell of a consumer: the thread that sends and receives for the agent machine."""
