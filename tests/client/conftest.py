"""What is tested here submits work that has to wait: on a server without nodes."""

from server import admin
from server import empty_server as server

__all__ = ["admin", "server"]
