"""``python -m ray_lance_stream.cli``."""

from __future__ import annotations

from ray_lance_stream.cli.main import main

main()
