"""Twenty programs, each written for 0.36 and for 0.38 and later of the official SDK; both find the same."""
