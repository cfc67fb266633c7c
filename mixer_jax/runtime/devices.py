"""The first line of a run: the devices that it really runs on, and why there are no others."""

import logging

import jax

import mixer_jax

# JAX tells this logger why an accelerator cannot be used, and goes on with the CPU.
_LOGGER = logging.getLogger("jax._src.xla_bridge")
_heard: list[str] = []


class _Listener(logging.Handler):
  def emit(self, record: logging.LogRecord) -> None:
    text = " ".join(record.getMessage().split())
    if text not in _heard:
      _heard.append(text)


def listen() -> None:
  """Keeps the warnings of JAX's search for devices; to be called before it begins."""
  if not any(isinstance(handler, _Listener) for handler in _LOGGER.handlers):
    _LOGGER.addHandler(_Listener(logging.WARNING))
    _LOGGER.setLevel(logging.WARNING)
    _LOGGER.propagate = False


def describe() -> str:
  """Versions, backend, devices and, on a CPU, the reason for it as far as JAX gives one."""
  device, number = jax.devices()[0], jax.process_count()
  line = f"mixer_jax {mixer_jax.__version__}, JAX {jax.__version__}, backend {device.platform}:"
  line += f" {jax.device_count()} x {device.device_kind}"
  line += f" in {number} processes" if number > 1 else ""
  return f"{line} ({'; '.join(_heard)[:500]})" if _heard and device.platform == "cpu" else line


def print_line() -> None:
  """Prints `describe`."""
  print(describe(), flush=True)
