from clusters import cluster, kubectl, team

__all__ = ["cluster", "kubectl", "team"]
