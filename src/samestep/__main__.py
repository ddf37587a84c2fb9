"""`python -m samestep`: the command line."""

from samestep.cli import main

main()
