"""Bursar decides who gets which GPUs, when, and who pays."""
