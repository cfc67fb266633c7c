"""The options of augmentation beyond crops and flips, named as in the recipes of DeiT."""

import dataclasses
from typing import Annotated

from mixer_jax.errors import UserError
from mixer_jax.options import Option, one_of

POLICIES = ("", "rand", "three")
_Chance = lambda text: Annotated[float, Option(text, 0, 1)]
_Alpha = lambda text: Annotated[float, Option(text, 0, 100)]


@dataclasses.dataclass(frozen=True)
class Augment:
  """The group `config.augment`: all of it is off unless set.

  DeiT (Touvron et al., 2021, https://arxiv.org/abs/2012.12877) has policy="rand", mixup=0.8,
  cutmix=1.0, mix="batch", erasing=0.25 and smallest_area=0.08; DeiT III (Touvron et al., 2022,
  https://arxiv.org/abs/2204.07118) policy="three" with colour_jitter=0.3. The order is: random
  area, or crop; flip; policy; colour jitter; normalisation; erasing; Mixup or CutMix.
  """

  policy: one_of("RandAugment, or one of grey, solarise and blur", POLICIES) = ""
  operations: Annotated[int, Option("rand: operations an image may get", 1, 16)] = 2
  probability: _Chance("rand: probability that each of them is applied") = 0.5
  magnitude: Annotated[float, Option("rand: mean magnitude of the operations", 0, 10)] = 9.0
  magnitude_noise: Annotated[float, Option("rand: standard deviation of the magnitude", 0, 100)] = (
    0.5
  )
  increasing: Annotated[
    bool, Option("rand: every operation grows stronger with the magnitude, timm's inc1")
  ] = True
  smallest_area: _Chance("least share of a random area of the stored image; 0: none") = 0.0
  colour_jitter: _Chance("most change of brightness, contrast and saturation") = 0.0
  erasing: _Chance("share of images with a rectangle of noise") = 0.0
  mixup: _Alpha("both parameters of Mixup's beta distribution of shares; 0: no Mixup") = 0.0
  cutmix: _Alpha("both parameters of CutMix's beta distribution of shares; 0: no CutMix") = 0.0
  switch: _Chance("share of CutMix if Mixup is on, too") = 0.5
  mix: one_of("draw shares and boxes for each example, or once", ("example", "batch")) = "example"

  @property
  def mixes(self) -> bool:
    return bool(self.mixup or self.cutmix)

  def check(self, *, pad: int, resize: int, random_crop: bool, crop: str) -> None:
    """Raises a UserError for a random area beside another crop, see `ImageData`."""
    crops = {f"pad={pad}": pad and not resize, "random_crop=True": random_crop}
    crops[f"crop={crop}"] = crop
    other = next((name for name, given in crops.items() if given), "")
    if self.smallest_area and other:
      why = f"it crops at random, and so does data.{other}; turn one of them off"
      raise UserError(f"augment.smallest_area is {self.smallest_area}: {why}")
