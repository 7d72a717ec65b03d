"""The command line ``ray-lance-stream``: looks at checkpoints, setups and steps; starts nothing, runs nothing.

Modules of this package import little when they are loaded, so that ``--help`` is quick: what reads tables or
checkpoints is imported by the command that needs it.
"""
