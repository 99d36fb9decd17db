"""Counterflow: hybrid-parallel pretraining from one config. Its packages are the folders of the same names."""
