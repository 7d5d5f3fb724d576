"""gRPC stubs of version 1, generated from proto/scheduler/v1 by `make proto`."""
