"""Recipes for a small ResMLP, as in the table "Training" of ResMLP: labels, a teacher, DINO first.

  python -m mixer_jax.main --config=configs/resnet_cifar.py --workdir=runs/teacher
  python -m mixer_jax.main --config=configs/dino_cifar.py:resmlp --workdir=runs/dino
  python -m mixer_jax.study --study=configs/studies/recipes.py --workdir=DIR

All recipes have 50 epochs on the images of the bundled sample; the teacher and DINO have their own.
Other directories: --set=hard:distillation.teacher=RUN, --set=soft:..., --set=dino:pretrained=RUN.
"""

import pathlib

from mixer_jax import study

_CONFIGS = pathlib.Path(__file__).parent.parent
PUBLISHED = {"old_fashioned": 69.2, "deit": 76.6, "hard": 77.8, "dino": 76.5}


def config(recipe):
  if recipe in ("hard", "soft"):
    config = study.read_config(_CONFIGS / "distill_cifar.py", recipe)
    config.distillation.teacher = "runs/teacher"
  else:
    labels = "deit" if recipe == "dino" else recipe
    config = study.read_config(_CONFIGS / "resmlp_cifar.py", labels)
    config.pretrained = "runs/dino" if recipe == "dino" else ""
  return config


def get_study():
  return study.Study(
    title="Recipes for a small ResMLP",
    config=config,
    axes={"recipe": ("old_fashioned", "deit", "hard", "soft", "dino")},
    lines=("recipe",),
    source="ResMLP-S12 on ImageNet (Touvron et al., 2022), 90 epochs old-fashioned, 400 others",
    published={(recipe,): study.Published(value) for recipe, value in PUBLISHED.items()},
    notes=[
      "deit has the parts of DeiT's recipe at a lower strength; hard and soft add a teacher to it, dino"
      " starts it from features that were trained without labels.",
    ],
  )


def get_config(run):
  return get_study().run_config(run)
