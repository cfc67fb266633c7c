"""Devices by name: their published figures, and compile-only stand-ins for them.

XLA needs no device to compile for one: libtpu describes TPUs by the name of a topology, and the CUDA
plug-in compiles for a GPU whose figures a text gives.
"""

import dataclasses
import functools
import importlib
from importlib import metadata
import math
import os
import re
from typing import NamedTuple, Sequence

import jax
from jax.experimental import topologies

from mixer_jax.errors import UserError, reason

_GPUS_PER_HOST = 8  # at most
# A 400 Gbit/s link of each GPU to other hosts, which no maker of GPUs publishes.
_BETWEEN_HOSTS = 50e9
# Of a GPU's memory JAX takes this share, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_GPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Rates:
  """Published peaks of one device, per second.

  Attributes:
    bfloat16: operations of matrix products with operands of 16 bits.
    float32: of float32 operands at JAX's default precision: TF32 on a GPU, one bfloat16 pass on a TPU.
    highest: of float32 operands at precision "highest".
    float64: of float64 operands; 0 where there is no such unit.
    memory: bytes read or written.
    links: bytes that a device sends to others of its host or, of a TPU, of its slice.
    between_hosts: bytes that a GPU sends to other hosts.
  """

  bfloat16: float
  float32: float
  highest: float
  float64: float
  memory: float
  links: float
  between_hosts: float = _BETWEEN_HOSTS


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of device: bytes of memory, rates and, of a GPU, what XLA asks about it."""

  memory: float
  rates: Rates
  name: str = ""  # NVIDIA's
  multiprocessors: int = 0
  capability: tuple[int, int] = (0, 0)
  cache: int = 0  # bytes of the second level
  clock: float = 0.0  # GHz
  shared_memory: int = 0  # bytes that a block may have

  @property
  def is_gpu(self) -> bool:
    return bool(self.name)


def _gpu(name, processors, capability, gigabytes, cache, clock, shared, *rates):
  return Kind(gigabytes * 1e9, Rates(*rates), name, processors, capability, cache, clock, shared)


def _tpu(gibibytes, products, memory, links):
  # Six bfloat16 passes make a product of precision "highest".
  return Kind(gibibytes * 2**30, Rates(products, products, products / 6, 0.0, memory, links))


# The makers' data sheets: NVIDIA's of A100, H100 SXM, H200 SXM and HGX B200 (dense products, NVLink one way);
# https://docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e (links of all ports together).
KINDS = {
  "a100_40": _gpu(
    *("NVIDIA A100-SXM4-40GB", 108, (8, 0), 40, 40 << 20, 1.41, 166912),
    *(312e12, 156e12, 19.5e12, 19.5e12, 1.555e12, 300e9),
  ),
  "a100_80": _gpu(
    *("NVIDIA A100-SXM4-80GB", 108, (8, 0), 80, 40 << 20, 1.41, 166912),
    *(312e12, 156e12, 19.5e12, 19.5e12, 2.039e12, 300e9),
  ),
  "h100": _gpu(
    *("NVIDIA H100 80GB HBM3", 132, (9, 0), 80, 50 << 20, 1.98, 232448),
    *(989e12, 494e12, 67e12, 67e12, 3.35e12, 450e9),
  ),
  "h200": _gpu(
    *("NVIDIA H200", 132, (9, 0), 141, 50 << 20, 1.98, 232448),
    *(989e12, 494e12, 67e12, 67e12, 4.8e12, 450e9),
  ),
  "b200": _gpu(
    *("NVIDIA B200", 148, (10, 0), 180, 126 << 20, 1.965, 232448),
    *(2250e12, 1100e12, 80e12, 40e12, 8e12, 900e9),
  ),
  "v4": _tpu(32, 275e12, 1.228e12, 300e9),
  "v5e": _tpu(16, 197e12, 0.819e12, 200e9),
  "v5p": _tpu(95, 459e12, 2.765e12, 600e9),
  "v6e": _tpu(32, 918e12, 1.64e12, 400e9),
}


class Target(NamedTuple):
  """Some devices of a kind.

  Attributes:
    spec: as it was asked for.
    kind: of each device.
    hosts: that have them; 1 for TPUs, whose links do not end at a host.
    number: of devices.
  """

  spec: str
  kind: Kind
  hosts: int
  number: int

  @property
  def platform(self) -> str:
    """As `jax.jit(...).lower(lowering_platforms=...)` takes it."""
    return "cuda" if self.kind.is_gpu else "tpu"

  @property
  def usable_memory(self) -> float:
    """Bytes of a device that JAX gives to programs."""
    return self.kind.memory * (_GPU_SHARE if self.kind.is_gpu else 1.0)

  def send_seconds(self, sent: float) -> float:
    """Least seconds in which each device sends so many bytes to all others in turn.

    Between hosts only a host's share of what is left travels.
    """
    rates, inner = self.kind.rates, self.number // self.hosts
    if self.hosts == 1:
      return sent / rates.links
    return max(sent / rates.links, sent / inner / rates.between_hosts)


def parse(spec: str) -> Target:
  """Reads "h100", "h100:8", "h100:4x8" (hosts x GPUs) or "v5e:4x4", the name of a TPU's topology."""
  kind, _, shape = spec.partition(":")
  if kind not in KINDS:
    raise UserError(f"--devices has {kind!r}; allowed: {', '.join(KINDS)}, and h100:8 or v5e:2x4")
  form, text = (r"\d+(x\d+)?", "8 or HOSTSx8") if KINDS[kind].is_gpu else (r"\d+(x\d+)*", "2x4")
  if shape and not re.fullmatch(form, shape):
    raise UserError(f"--devices={spec}: the shape is {shape!r}; allowed: as {text}")
  sizes = [int(size) for size in shape.split("x")] if shape else [1]
  if 0 in sizes:
    raise UserError(f"--devices={spec}: has no device")
  if not KINDS[kind].is_gpu:
    return Target(spec, KINDS[kind], 1, math.prod(sizes))
  hosts, each = sizes if len(sizes) == 2 else (1, *sizes)
  if each > _GPUS_PER_HOST:
    allowed = f"at most {_GPUS_PER_HOST} a host, as {kind}:{-(-each // _GPUS_PER_HOST)}x8"
    raise UserError(f"--devices={spec}: {each} GPUs of one host; allowed: {allowed}")
  return Target(spec, KINDS[kind], hosts, hosts * each)


def devices(target: Target) -> Sequence[jax.Device]:
  """Devices that programs can be compiled for, and nothing else.

  Raises:
    UserError: the compiler is not installed, or knows no such topology.
  """
  # Neither compiler may look for devices, or for the libraries that only a device needs.
  os.environ.update(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", TPU_SKIP_MDS_QUERY="1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # its lock outlives a killed process
  os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")  # where it would look for one
  _check_wheels(target)
  try:
    found = _gpus(target) if target.kind.is_gpu else _tpus(target)
  except (RuntimeError, ValueError) as e:  # JAX's own error is one of the first
    raise UserError(f"--devices={target.spec}: {reason(e)}") from e
  if len(found) != target.number:
    raise UserError(f"--devices={target.spec}: the compiler makes {len(found)} devices of it")
  return found


def _check_wheels(target: Target) -> None:
  """Raises a UserError for a compiler that is missing, or that JAX's version does not fit."""
  if target.kind.is_gpu:
    wanted = {"jax-cuda12-plugin": jax.__version__, "jax-cuda12-pjrt": jax.__version__}
  else:  # JAX names the versions that it takes, as libtpu==0.0.35.*
    found = (re.match(r"libtpu==([\d.]+)\.\*", line) for line in metadata.requires("jax"))
    wanted = {"libtpu": f"{next(filter(None, found))[1]}.*"}
  for name, version in wanted.items():
    try:
      own = metadata.version(name)
    except metadata.PackageNotFoundError:
      own = "missing"
    if not f"{own}.".startswith(version.removesuffix("*").removesuffix(".") + "."):
      needs = " ".join(f"'{name}=={version}'" for name, version in wanted.items())
      raise UserError(f"--devices={target.spec}: {name} is {own}; pip install {needs}")


def _gpus(target: Target) -> Sequence[jax.Device]:
  shape = f"{target.hosts} x 1 x {target.number // target.hosts}"
  about = dict(target_config=_described(target.kind), topology=shape)
  describe = functools.partial(topologies.get_topology_desc, target.spec, platform="cuda", **about)
  try:
    return describe().devices
  except NotImplementedError:
    # JAX has looked for GPUs before, and has left the plug-in out because it found no driver.
    importlib.import_module("jax_plugins.xla_cuda12").initialize()
    return describe().devices


def _tpus(target: Target) -> Sequence[jax.Device]:
  kind, _, shape = target.spec.partition(":")
  # One device a chip, as JAX has it.
  about = {"chip_config_name": "megacore"} if kind == "v4" else {}
  if target.number == 1:
    shape = "1x1x1" if kind in ("v4", "v5p") else "1x1"
    about["chips_per_host_bounds"] = (1, 1, 1)  # a part of a host
  return topologies.get_topology_desc(f"{kind}:{shape}", platform="tpu", **about).devices


def _described(kind: Kind) -> str:
  """XLA's text of a GPU (GpuTargetConfigProto); the limits of threads are those of all kinds here."""
  major, minor = kind.capability
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      core_count: {kind.multiprocessors} fpus_per_core: {64 if major == 8 else 128}
      shared_memory_per_block: 49152 shared_memory_per_block_optin: {kind.shared_memory}
      shared_memory_per_core: {kind.shared_memory + 1024}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {round(kind.rates.memory)} l2_cache_size: {kind.cache}
      clock_rate_ghz: {kind.clock} device_memory_size: {round(kind.memory)}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 1 }}
    device_description_str: "{kind.name}"
  """
