from support.api.kubectl_cluster import any_kubectl, cluster, kubectl, team

__all__ = ["any_kubectl", "cluster", "kubectl", "team"]
