"""What the server of tests/commands.py imports last: it does what every command begins with, once for all forks."""

from __future__ import annotations

import gc

from counterflow.launch.compose import compose_config

compose_config([])  # finds Hydra's plugins and builds its parser
# No collection in a fork walks over what was imported, and copies its pages with that.
gc.collect()
gc.freeze()
