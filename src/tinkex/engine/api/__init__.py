"""The door of the engine: the Tinker protocol over HTTP, or called in-process, with routes from the endpoint table.

``app`` builds the routes; one module per group of endpoints holds their handlers; ``errors`` is the one place where
domain errors become HTTP answers.
"""
