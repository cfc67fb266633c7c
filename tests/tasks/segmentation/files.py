"""Small sets of pairs as files."""

import numpy as np
from PIL import Image

VOID, CLASSES = 3, 3
SIZE = (20, 24)  # height and width


def example(rng, size=SIZE):
  """Four fields of any classes, whose colours tell them, and a void cross between them."""
  height, width = size
  mask = np.full(size, VOID, np.uint8)
  row, column = rng.integers(6, height - 6), rng.integers(6, width - 6)
  for rows in (slice(0, row - 1), slice(row + 1, None)):
    for columns in (slice(0, column - 1), slice(column + 1, None)):
      mask[rows, columns] = rng.integers(CLASSES)
  return colours(mask), mask


def colours(mask):
  return np.stack(
    [40 + 60 * mask.astype(int), 240 - 50 * mask.astype(int), 9 + 0 * mask], -1
  ).astype(np.uint8)


def write(root, counts, size=SIZE, ade=False):
  """Writes splits of so many pairs; as CamVid, or as ADE20K with palettes and the void id 0."""
  rng = np.random.default_rng(0)
  for split, n in counts.items():
    images, masks = (f"images/{split}", f"annotations/{split}") if ade else (split, f"{split}annot")
    for place in (images, masks):
      (root / place).mkdir(parents=True)
    for i in range(n):
      image, mask = example(rng, size)
      Image.fromarray(image).save(root / images / f"a{i}.png")
      file = Image.fromarray(np.where(mask == VOID, 0, mask + 1).astype(np.uint8) if ade else mask)
      if ade:
        file.putpalette(rng.integers(0, 256, 768).tolist())
      file.save(root / masks / f"a{i}.png")
  return root
