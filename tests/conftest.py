"""Fixtures shared by all tests."""

import signal

import hypothesis

pytest_plugins = ["postgres", "offices"]

# A shared machine may pause any test: deadlines would only tell how busy it is.
hypothesis.settings.register_profile(
    "bursar", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("bursar")

# A shell that starts tests in the background has interrupts ignored, and so would everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
