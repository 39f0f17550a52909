"""A discrete-event simulation of a swarm, with the policies that the real swarm runs.

Two views of the same swarm, since a day of a thousand workers and the life of one microbatch differ by seven orders of
magnitude:

* :mod:`~lightning_swarm.simulation.allocation`: who serves which stage over hours of a preemption trace. Throughput is
  that of the weakest stage; microbatches are not simulated.
* :mod:`~lightning_swarm.simulation.swarm`: every microbatch, with its forward and backward passes, transfers, steps,
  failures and repairs.
"""
