"""Halos: what a piece needs from its neighbours, as thin strips, as windows, or once for several layers."""
