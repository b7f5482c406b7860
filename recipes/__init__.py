"""Hydra configuration: `config.yaml`, groups, and whole recipes under `recipe/`."""
