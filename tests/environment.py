"""The environment of the tests and of all processes that they start; imported before JAX.

The tests spend their time compiling small programs: LLVM's optimizations are off, XLA emits fused
loops in the older of its two ways where it has both, which takes a quarter of the time, a program
is compiled in one piece, as splitting it costs a sixth of the time, and all processes of a session share the programs
that one has compiled, in a directory that goes with the session. Where
JAX_COMPILATION_CACHE_DIR is set, they stay there, for the next session, too. Programs keep no lines
of the source for their operations, which would take a tenth of the time.
MIXER_JAX_TEST_PLATFORM=cuda runs them on a GPU; those of several devices need as many.
"""

import atexit
from importlib import metadata
import os
import shutil
import tempfile

_BEFORE_0_11 = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11)
OLDER_LOOPS = "--xla_cpu_use_fusion_emitters=false" if _BEFORE_0_11 else ""
QUICK = (
  "--xla_backend_optimization_level=0",
  "--xla_cpu_parallel_codegen_split_count=1",
  *filter(None, [OLDER_LOOPS]),
)
_FLAGS = ("--xla_force_host_platform_device_count=8", *QUICK)


def prepare() -> None:
  # Each flag once, though a process inherits them: JAX looks programs up by the flags, too.
  given = os.environ.get("XLA_FLAGS", "").split()
  os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in _FLAGS if flag not in given)])
  os.environ["JAX_PLATFORMS"] = os.environ.get("MIXER_JAX_TEST_PLATFORM", "cpu")
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the commands do
  # Huge pages for the workers and their children: a tenth of the time here.
  os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA takes its own options for features of a processor
  os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    directory = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)


prepare()
