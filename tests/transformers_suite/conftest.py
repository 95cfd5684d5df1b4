"""Makes transformers' own tests importable as `transformers_tests`."""

import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fetch import fetch


# Beside the checkout's other build products, which git does not track.
sys.path.insert(0, str(fetch(HERE.parent.parent / "build" / "transformers_suite").parent))
