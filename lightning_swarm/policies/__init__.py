"""Pure policies: numbers and the time in, decisions out. The swarm and the simulator run the same objects."""
