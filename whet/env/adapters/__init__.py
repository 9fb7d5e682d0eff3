"""Environments of other packages, each spoken to as it is: their code is imported where one of them is used, and nowhere else."""
