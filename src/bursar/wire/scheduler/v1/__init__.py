"""Made from proto/scheduler/v1 by `make proto`."""
