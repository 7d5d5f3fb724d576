"""OpenShift's names for what Bursar has: projects are namespaces, role bindings are members.

Portals that administer OpenShift, such as ColdFront's plugins, use this API. Read `project.py` first.
"""
