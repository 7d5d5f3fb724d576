"""gRPC stubs of the agent and admin protocols, generated from proto/."""
