"""What the routes of other protocols share: translating their requests to samples, and samples to their answers."""
