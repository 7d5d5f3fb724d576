"""What agents and the control plane say to each other: made from proto/."""
