"""One request, one reply: how a call reaches a server, and how often it is tried."""
