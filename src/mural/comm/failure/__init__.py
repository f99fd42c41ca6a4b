"""All ranks fail together: what one rank raises ends the others' waits, and raises there too.

agree   a block that all ranks leave alike: with the error where it failed, with one that quotes it elsewhere
alarm         a wait that ends with an error when a peer raised or ended
shared_fate   a call that fails on one rank fails on all, and whether another may follow it
connections   a group's backend as the others use it: which ranks are present, and how to end its waits
"""
