"""Lake or ocean: whole windows of a map of the world against patches, and continents as domains."""
