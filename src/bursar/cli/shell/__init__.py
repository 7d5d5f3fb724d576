"""Parts that commands share: connection options, output, errors and exit codes, completion, manifests.

Read `connection.py` and `problem.py` first.
"""
