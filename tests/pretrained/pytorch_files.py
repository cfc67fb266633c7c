"""A writer of PyTorch's files without PyTorch, by the definition of their format."""

import io
import pickle
import zipfile

import numpy as np

_MAGIC, _VERSION, _SYSTEM = 0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}
_KINDS = {"<f4": "Float", "<f8": "Double", "<f2": "Half", "<i8": "Long", "<V2": "BFloat16"}


class Global:
  """What a pickle names by module and name; it need not exist."""

  def __init__(self, module, name):
    self.module, self.name = module, name

  def __call__(self, *_):
    raise AssertionError("only a reader calls it")


class Object:
  """What a pickle makes by calling a `Global` with arguments and giving it a state."""

  def __init__(self, function, *arguments, state=None):
    self.parts = (function, arguments, state)

  __call__ = Global.__call__


class Tensor:
  """A view of an array; `base` is the array that owns the numbers."""

  def __init__(self, array):
    self.array = array
    self.base = array.base if isinstance(array.base, np.ndarray) else array


class _Pickler(pickle._Pickler):
  def __init__(self, file, before_archives):
    super().__init__(file, protocol=2)
    self.before_archives, self.storages = before_archives, {}

  def save_global(self, obj, name=None):
    if not isinstance(obj, Global):
      return super().save_global(obj, name)
    self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())

  def persistent_id(self, obj):
    if not isinstance(obj, np.ndarray):
      return None
    number, _ = self.storages.setdefault(id(obj), (len(self.storages), obj))
    kind = Global("torch", f"{_KINDS[obj.dtype.str]}Storage")
    pid = ("storage", kind, str(number), "cpu", obj.size)
    return (*pid, None) if self.before_archives else pid

  def reducer_override(self, obj):
    if isinstance(obj, Global):
      return obj.name  # by save_global
    if isinstance(obj, Object):
      return obj.parts
    if not isinstance(obj, Tensor):
      return NotImplemented
    array, size = obj.array, obj.array.itemsize
    offset = (array.ctypes.data - obj.base.ctypes.data) // size
    strides = tuple(n // size for n in array.strides)
    hooks = Object(Global("collections", "OrderedDict"))
    arguments = (obj.base, offset, array.shape, strides, False, hooks)
    return Global("torch._utils", "_rebuild_tensor_v2"), arguments


def content(value, before_archives=False):
  """The bytes of a file of a value made of `Tensor`, `Object` and Python's own types."""
  file = io.BytesIO()
  pickler = _Pickler(file, before_archives)
  pickler.dump(value)
  arrays = [array for _, array in pickler.storages.values()]
  storages = [array.tobytes("A") for array in arrays]
  if before_archives:
    sizes = [array.size.to_bytes(8, "little") for array in arrays]
    head = b"".join(pickle.dumps(x, protocol=2) for x in (_MAGIC, _VERSION, _SYSTEM))
    keys = pickle.dumps([str(i) for i in range(len(storages))], protocol=2)
    return head + file.getvalue() + keys + b"".join(a + b for a, b in zip(sizes, storages))
  archive = io.BytesIO()
  with zipfile.ZipFile(archive, "w") as members:
    members.writestr("archive/data.pkl", file.getvalue())
    for i, storage in enumerate(storages):
      members.writestr(f"archive/data/{i}", storage)
  return archive.getvalue()
