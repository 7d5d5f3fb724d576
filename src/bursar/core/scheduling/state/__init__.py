"""The scheduler's view of the cluster, as NumPy columns that are kept up to date change by change.

`cluster_state.py` holds it all; `fleet.py` has the nodes, `placed_columns.py` the placed work, `equivalence.py` the
pending work, `fair_share.py` the tenants. `node_filter.py` and `node_scores.py` filter and score nodes.
"""
