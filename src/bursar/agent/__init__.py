"""The node agent: it runs placements under shims, in sandboxes, and reports to the control plane over a gRPC stream.

`machine` is the pure state machine, `executor` carries out its instructions, `shim` supervises one command, `host`
measures and isolates, `control` is the gRPC client and server. Read `machine/state.py` first, then `shim/shim.py`.
"""
