"""Offload: memory that leaves the device between two uses, and is back before the second one.

A step has moments at which autograd saves or takes a tensor, or a module begins (`moments`). The first step of its kind
is noted (`StepTrace`): which memory is used when, and how long it takes from one moment to the next. From that follows
what leaves, when, and when it comes back (`SwapPlan`); later steps do so.
"""
