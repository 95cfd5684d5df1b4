"""The main job on a real model: convert, compare, generate, train, save, reload."""

from .run import run_demo
from .smollm2 import DemoError, demo_checkpoint


__all__ = ["DemoError", "demo_checkpoint", "run_demo"]
