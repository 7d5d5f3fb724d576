"""Commands about the session: login, context, kubeconfig, tokens, whoami, completion, version.

Read `login.py` first.
"""
