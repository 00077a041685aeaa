"""What a TPU or GPU that is not here would do: programs compiled for it, with their memory and bounds."""
