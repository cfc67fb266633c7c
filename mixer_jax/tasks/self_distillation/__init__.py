"""Self-distillation of images without labels (DINO)."""
