"""The benchmark: one configuration against another, pair by pair."""
