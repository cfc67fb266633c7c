import pytest

from tests.images.loading import write


@pytest.fixture
def twelve(tmp_path):
  """Twelve classes, c00 to c11; the image of class i has the grey 10 i."""
  names = {
    f"{split}/c{i:02d}/{split}.png": 10 * i for i in range(12) for split in ("train", "test")
  }
  return write(tmp_path / "data", names)
