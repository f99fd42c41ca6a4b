"""What far-away pixels are worth: whole-image training beside patches, on labels that look near or far."""
