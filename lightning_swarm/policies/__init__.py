"""Pure policies: numbers in, decisions out, time passed as an argument. The swarm and the simulator run the same objects."""
