"""Bursar decides who gets which GPUs, when, and who pays."""

__version__ = "0.1.0"
