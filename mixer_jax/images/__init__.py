"""Images: the sets that they are read from, decoding, crops, augmentation on the device."""
