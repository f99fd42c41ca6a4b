"""Merged dims: what a reshape does to a layout, and operations on the dims underneath."""
