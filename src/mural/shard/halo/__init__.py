"""Halos: what a piece needs of its neighbours, as thin strips, as windows, or once for several layers."""
