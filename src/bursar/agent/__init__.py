"""The node agent: it runs placements under shims, in sandboxes, and speaks to the control plane.

`machine` decides (pure), `executor` acts, `shim` owns one command, `host` knows the machine, `control` speaks. Read
`machine/state.py` first, then `shim/shim.py`.
"""
