"""Plans for a TPU or GPU that is not here: programs compiled for it, with their memory and bounds."""
