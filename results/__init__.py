"""Measurements as rows of CSV files, and the tables and pictures of the pages made from them."""
