"""Label maps of whole images: one device under a cap, several ranks, and sliding windows in comparison."""
