"""The engine's HTTP API: the Tinker protocol as an ASGI application, also called in-process; routes from the endpoint table.

``app`` builds the routes; each group of endpoints has a module with its handlers; ``errors`` maps domain errors to HTTP
responses.
"""
