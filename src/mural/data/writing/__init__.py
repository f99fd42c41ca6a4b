"""Writers: images written piece by piece, from one process or several ranks, and conversion."""
