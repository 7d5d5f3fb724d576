"""What is tested here submits work that has to wait: on a server without nodes."""

from support.process.server import admin
from support.process.server import empty_server as server

__all__ = ["admin", "server"]
