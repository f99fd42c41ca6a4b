"""What a proof costs, and what it proves, for ten models."""
