"""The network shell of a consumer: the thread that moves messages of the agent machine over gRPC."""
