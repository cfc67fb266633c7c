"""Text: the files that it is read from, WordPiece vocabularies, sequences of token ids."""
