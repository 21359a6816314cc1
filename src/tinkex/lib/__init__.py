"""The path under which official-SDK programs import the clients: ``tinkex.lib.public_interfaces``."""
