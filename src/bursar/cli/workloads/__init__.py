"""Commands on work: run, logs, status, explain, simulate, jobs. Read `run.py` first."""
