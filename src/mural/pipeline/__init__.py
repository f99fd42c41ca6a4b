"""Pipelines: who works on which micro-batch when, as lists of actions; their messages, their proof, their price.

`schedule` and `gems` return what each seat computes, in order; `transfers` adds what crosses between seats; `checker`
proves such a program free of deadlock; `timeline` prices it. These files need only the standard library.
"""
