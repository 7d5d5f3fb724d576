from server import admin, empty_server, server

__all__ = ["admin", "empty_server", "server"]
