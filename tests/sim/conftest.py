from support.process.server import admin, server

__all__ = ["admin", "server"]
