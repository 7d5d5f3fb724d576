"""The host: inventory and load, control groups, sandboxes, scratch space, disk guard, environment of commands.

Read `cgroup.py` and `sandbox.py` first.
"""
