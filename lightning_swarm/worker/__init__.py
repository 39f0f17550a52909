"""What a peer does that serves a stage: compute microbatches, sum their gradients, step, and hand its state on."""
