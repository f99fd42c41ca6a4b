"""Images larger than memory: windows read ahead of their use, results written in boxes."""
