"""Commands on nodes and the cluster: cordon, drain, taint, top."""
