"""Intake: everything that can be rejected is rejected here; what is accepted is on record before its id is returned."""
