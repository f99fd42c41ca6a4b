"""Separation networks over ranks: the figure of document `002`."""
