"""Lanes: the places that compute, in this process or in a worker process, behind one interface."""
