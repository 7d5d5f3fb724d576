"""The machine: its inventory and load, control groups, sandboxes, scratch space, the environment of commands."""
