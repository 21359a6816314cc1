"""Bytes ⇄ types, shared by client and server: the endpoint table and the two codecs."""
