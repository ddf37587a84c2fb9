"""`samestep bench`: how long a step takes, and how far it is from one without synchronising."""
