"""Simulated chips for soaks."""

import os

PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=1200"  # chips that share two cores wait for each other


def simulate(num_devices: int) -> None:
    """Sets the environment so that jax, which must not be imported yet, has `num_devices` CPU devices."""
    os.environ["JAX_NUM_CPU_DEVICES"] = str(num_devices)


def be_patient() -> None:
    """Lets simulated chips wait for each other for long; before jax first uses a device."""
    os.environ["XLA_FLAGS"] = f"{PATIENCE} {os.environ.get('XLA_FLAGS', '')}"
