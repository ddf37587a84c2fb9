"""`samestep run`: torchelastic's agent, ranks as processes, their output, and the report of a failure.

Nothing here imports torch before the ranks have been started: `agent.py` and `rendezvous.py` do, and
`run.py` imports them last.
"""
