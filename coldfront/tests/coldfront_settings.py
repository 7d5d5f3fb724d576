"""ColdFront's local settings for the tests."""

import os

from coldfront.config.base import INSTALLED_APPS

INSTALLED_APPS += ["bursar_coldfront"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
ALLOWED_HOSTS = ["testserver"]
SECURE_SSL_REDIRECT = False

BURSAR_URL = "http://127.0.0.1:1"
BURSAR_TOKEN = ""
BURSAR_RESOURCES = ["GPU cluster"]
BURSAR_MAPPING = os.environ["BURSAR_TEST_MAPPING"]
