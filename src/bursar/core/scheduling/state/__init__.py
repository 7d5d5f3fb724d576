"""The scheduler's view of the cluster, as NumPy columns that are kept up to date change by change.

Read `cluster_state.py` first: it has all of it. `fleet.py` has the nodes, `placed_columns.py` the placed work,
`equivalence.py` the pending work in equivalence classes, `fair_share.py` the shares of tenants, `nomination.py` the
capacity kept for nominated work. `node_filter.py`
filters nodes, `node_scores.py` scores them by `packing.py` (bin packing).
"""
