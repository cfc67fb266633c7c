"""The first line of a run: the devices that it really runs on, and why there are no others."""

import logging

import jax

import mixer_jax

# JAX tells this logger why an accelerator cannot be used, and goes on with the CPU.
_LOGGER = logging.getLogger("jax._src.xla_bridge")
_heard: list[str] = []


def _hear(record: logging.LogRecord) -> bool:
  """A logging filter that remembers a warning and does not pass it on."""
  text = " ".join(record.getMessage().split())
  if text not in _heard:
    _heard.append(text)
  return False


def listen() -> None:
  """Keeps the warnings of JAX's search for devices. It must be called before the search begins."""
  _LOGGER.setLevel(logging.WARNING)
  _LOGGER.addFilter(_hear)


def print_line() -> None:
  """Prints versions, backend, devices and, on a CPU, the reason as far as JAX gives one."""
  device, number = jax.devices()[0], jax.process_count()
  line = f"mixer_jax {mixer_jax.__version__}, JAX {jax.__version__}, backend {device.platform}:"
  line += f" {jax.device_count()} x {device.device_kind}"
  line += f" in {number} processes" if number > 1 else ""
  reason = f" ({'; '.join(_heard)[:500]})" if _heard and device.platform == "cpu" else ""
  print(line + reason, flush=True)
