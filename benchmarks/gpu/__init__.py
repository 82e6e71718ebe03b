"""Parts of `scripts/gpu_check`: what only a device can show."""
