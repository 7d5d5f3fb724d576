"""The Django app: it connects the receivers when ColdFront starts."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class BursarConfig(AppConfig):
    name = "bursar_coldfront"
    verbose_name = "Bursar"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        import_module("bursar_coldfront.receivers")
