"""Translation from one language to another by encoders with decoders."""
