"""Pipelines: who works on which micro-batch when, as lists of actions; their messages, their proof, their price.

`schedule`, `interleaved` and `gems` return what each seat computes, in order; `messages` adds what crosses between
seats; `checker` proves such a program free of deadlock; `timeline` prices it. These files need the standard library
alone.
"""
