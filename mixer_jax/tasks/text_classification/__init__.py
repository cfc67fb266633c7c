"""Classification of sentences and of pairs of them."""
