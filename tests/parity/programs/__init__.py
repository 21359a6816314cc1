"""Programs as users of the official SDK write them; they import ``tinker`` and know nothing of us."""
