"""Readers: each format's files as arrays in their own dims, of which any box can be decoded."""
